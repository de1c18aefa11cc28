"""Target files for Vulkan: what families of devices grant beyond what every device does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.export import context_length, export, prepare_model
from mlcpipe.devices import vulkan
from mlcpipe.errors import TargetError
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import storage_bytes
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import Target, load_target, target_names
from tests.conftest import TinyLlama, write_llama
from tests.spirv import harness
from tests.spirv.validity import check, needs_tools

GENERIC = load_target("vulkan")
FAMILIES = [name for name in target_names() if name != "vulkan" and load_target(name).tvm["kind"] == "vulkan"]
# Of a llama of 8B: 8 heads of 128 for keys, 131,072 positions.
LARGE = TinyLlama(heads=32, kv_heads=8, head_dim=128, hidden_size=4096, positions=131072)


def test_every_device_binds_128_mib() -> None:
    """Vulkan 1.2, table of required limits: maxStorageBufferRange is at least 2**27."""
    assert GENERIC.limits["max_binding_bytes"] == 2**27
    assert (GENERIC.kernels, GENERIC.backend) == ("gpu", "vulkan")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_take_the_same_weights_and_no_less(name: str) -> None:
    target = load_target(name)
    same = {"weight_layout": GENERIC.weight_layout, "kernels": GENERIC.kernels}
    assert replace(target, **same) == target and target.backend == GENERIC.backend
    less = (
        {"max_prefill_chunk"} if "mtriple" in target.tvm["host"] else set()
    )  # phones compute prompts in smaller pieces
    assert all(target.limits[key] >= value for key, value in GENERIC.limits.items() if key not in less)


def test_contexts_end_where_a_layer_of_the_cache_no_longer_binds(tmp_path: Path) -> None:
    def longest(name: str) -> int:
        target = load_target(name)
        return context_length(prepare_model(LARGE.config_json(), target, load_scheme("q4f16_1")), target, None)

    # 8 KiB a token in float32: 2**27 bytes are 16384 tokens; TVM's cache has one page more.
    assert [longest(name) for name in ("vulkan", "vulkan-f16", "intel-xe", "webgpu")] == [16384, 32768, 131072, 16368]


def test_the_workspace_of_attention_is_planned_and_must_fit_a_binding() -> None:
    """Results of parts: 1024 of each of the 32 heads, of 128 numbers and two sums."""
    facts = replace(LARGE, hidden_size=64, layers=1).config_json()
    scheme = load_scheme("q4f16_1")

    def planned(target: Target) -> list[int]:
        state = pipeline.run(export(prepare_model(facts, target, scheme), target, scheme, 16), *pipeline.SHARED)
        return sorted(storage_bytes(state.mod["decode"]))[-2:]

    values, sums = (4 * 1024 * 32 * numbers for numbers in (128, 2))
    few = planned(GENERIC)
    assert few[1] == values and few[0] >= sums
    with pytest.raises(TargetError, match=f"workspace of decode does not fit.*found {values:,} bytes"):
        planned(replace(GENERIC, limits={**GENERIC.limits, "max_binding_bytes": values - 1}))


def _limits(lanes: tuple[int, int], **others: int | bool) -> dict[str, int | bool]:
    known = {"max_threads": 1024, "max_shared_memory_bytes": 65536, "max_buffer_bytes": 2**32 - 4}
    sizes = {"min_subgroup_size": lanes[0], "max_subgroup_size": lanes[1], "can_require_subgroup_size": True}
    return {**known, **sizes, **others}


def _device(vendor: int, limits: dict[str, int | bool], *features: str) -> vulkan.Device:
    return vulkan.Device(
        0, "a GPU", kind="discrete", driver="", api_version="1.2", driver_uuid="", vendor_id=vendor,
        unified_memory=False, memory_bytes=1 << 34, limits=limits, features=frozenset(features), problem="",
    )  # fmt: skip


@pytest.mark.parametrize(
    "vendor, limits, name",
    [
        (0x10DE, _limits((32, 32), max_shared_memory_bytes=49152), "nvidia"),
        (0x1002, _limits((32, 64)), "amd-rdna"),
        (0x1002, _limits((64, 64)), "vulkan"),  # GCN
        (0x8086, _limits((8, 32), max_buffer_bytes=2**30), "intel-xe"),
        (0x8086, _limits((8, 32), can_require_subgroup_size=False), "vulkan"),
        (0x8086, _limits((8, 32), max_buffer_bytes=2**27), "vulkan"),
        (0x13B5, _limits((16, 16), max_shared_memory_bytes=32768), "mali"),
        (0x13B5, _limits((8, 8)), "vulkan"),  # Bifrost
        (0x5143, _limits((64, 128), max_shared_memory_bytes=32768, can_require_subgroup_size=False), "adreno"),
        (0x10005, _limits((8, 8)), "lavapipe"),
        (0x10005, _limits((4, 4)), "vulkan"),  # a CPU without vectors of 256 bits
        (0x1234, _limits((32, 32)), "vulkan"),
    ],
)
def test_a_device_has_a_target_that_suits_it(vendor: int, limits: dict[str, int | bool], name: str) -> None:
    assert _device(vendor, limits).best_target() == name


@pytest.mark.parametrize(
    "vendor, limits, shape, name",
    [
        (0x10DE, _limits((32, 32), max_shared_memory_bytes=49152), "16x16x16", "nvidia-rtx"),
        (0x10DE, _limits((32, 32), max_shared_memory_bytes=49152), "16x8x16", ""),
        (0x1002, _limits((32, 64)), "16x16x16", "amd-rdna3"),
        (0x8086, _limits((16, 32), max_buffer_bytes=2**30), "8x16x16", "intel-xe2"),
        (0x8086, _limits((8, 32), max_buffer_bytes=2**30), "8x8x16", ""),  # Arc A
        (0x10005, _limits((8, 8)), "8x8x8", ""),
    ],
)
def test_a_device_may_have_a_target_with_matrices(
    vendor: int, limits: dict[str, int | bool], shape: str, name: str
) -> None:
    assert _device(vendor, limits, "cooperativeMatrix", f"cooperativeMatrix{shape}").matrix_target() == name


_HOT = {"matmul", "gated_matmul", "take", "rms_norm", "add_rms_norm", "attend_few", "attend_many"}
_OF_SUBGROUPS = {
    "matmul": "gpu.subgroup_matmul", "gated_matmul": "gpu.subgroup_matmul", "attend_few": "gpu.subgroup_attention",
}  # fmt: skip


@needs_tools
@pytest.mark.parametrize("name", ["vulkan", *FAMILIES])
@pytest.mark.full
@pytest.mark.full_cases("vulkan", "android-mali", "intel-xe2")
def test_kernels_are_valid_and_hot_ones_have_rules_of_their_own(name: str, tmp_path: Path) -> None:
    target, scheme = load_target(name), load_scheme("q4f16_1")
    source = open_checkpoint(write_llama(tmp_path / "checkpoint", TinyLlama(intermediate_size=128)))
    state = pipeline.run(
        export(prepare_model(source.config, target, scheme), target, scheme, 64), *pipeline.SHARED, pipeline.SCHEDULE
    )
    lanes = int(target.schedule["subgroup"])
    rules = {kernel.op.removesuffix("_sliding"): kernel.rule for kernel in state.kernels}
    assert set(rules) >= _HOT and not [op for op in _HOT if rules[op] == "gpu.elementwise"]
    assert all((rules[op] == rule) == bool(lanes) for op, rule in _OF_SUBGROUPS.items()), rules
    found = harness.model_kernels(state)
    assert {kernel.subgroup_size for kernel in found} == ({0, lanes} if lanes else {0})
    assert max(kernel.workgroup[0] for kernel in found) <= target.limits["max_invocations"]
    assert max(kernel.shared_bytes for kernel in found) <= target.limits["max_shared_bytes"]
    # Those with matrices are checked by tests/vulkan/test_matrices.py: Debian's spirv-val does not know them.
    matrices = {kernel.name for kernel in found if "cooperativeMatrix" in kernel.features}
    assert bool(matrices) == bool(target.schedule.get("matrix_rows"))
    check([kernel for kernel in found if kernel.subgroup_size == lanes and kernel.name not in matrices], tmp_path)
