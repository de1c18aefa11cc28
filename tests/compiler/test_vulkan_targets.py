"""Target files for Vulkan: what families of devices grant beyond what every device does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlcpipe.compiler.export import context_length, prepare_model
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target, target_names
from tests.conftest import TinyLlama

GENERIC = load_target("vulkan")
FAMILIES = [name for name in target_names() if name != "vulkan" and load_target(name).tvm["kind"] == "vulkan"]
# Of a llama of 8B: 8 heads of 128 for keys, 131,072 positions.
LARGE = TinyLlama(heads=32, kv_heads=8, head_dim=128, hidden_size=4096, positions=131072)


def test_every_device_binds_128_mib() -> None:
    """Vulkan 1.2, table of required limits: maxStorageBufferRange is at least 2**27."""
    assert GENERIC.limits["max_binding_bytes"] == 2**27
    assert (GENERIC.kernels, GENERIC.link) == ("gpu", "device")


@pytest.mark.parametrize("name", FAMILIES)
def test_families_take_the_same_weights_and_no_less(name: str) -> None:
    target = load_target(name)
    same = {"weight_layout": GENERIC.weight_layout, "kernels": GENERIC.kernels}
    assert replace(target, **same) == target and target.link == GENERIC.link
    assert all(target.limits[key] >= value for key, value in GENERIC.limits.items())


def test_contexts_end_where_a_layer_of_the_cache_no_longer_binds(tmp_path: Path) -> None:
    def longest(name: str) -> int:
        target = load_target(name)
        return context_length(prepare_model(LARGE.config_json(), target, load_scheme("q4f16_1")), target, None)

    # 8 KiB a token in float32: 2**27 bytes are 16384 tokens, less one page that TVM's cache has more.
    assert [longest(name) for name in ("vulkan", "vulkan-f16", "intel-xe", "nvidia")] == [16368, 32752, 131056, 131072]
