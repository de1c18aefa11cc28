"""Records in the compiler: which apply, what they change, what is said of those that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tvm
import tvm_ffi

from mlcpipe.bundle.manifest import KernelInfo
from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import KernelReport, Lowering
from mlcpipe.passes.schedule_kernels import schedule_kernels
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from mlcpipe.tuned.kernels import kernel_hash, kernel_name, spaces_of
from mlcpipe.tuned.records import Record, Tuned
from tests.unit.tuning.records import record
from tir_schedules.op import op_of

TARGET = load_target("cpu")
VARIANT = next(one for one in TARGET.variants if one.name == "avx512_vnni")
SCHEME, LAYOUT = load_scheme("q4f16_1"), load_layout("rows16")
FUNC = definitions.matmul(SCHEME, LAYOUT, 64, 256, "float32")
HASH = "15bf5173748f2ef6"
FEW = {"int8_rows.few": 9, "int8_tail_rows.few": 6, "int8_blocks.few": 1}


def tuned(**changes: Any) -> Record:
    return record(kernel=HASH, variant="avx512_vnni", **{"bucket": "few", "knobs": FEW, **changes})


def scheduled(*records: Record, knobs: dict[str, int | str] | None = None) -> tuple[Any, KernelReport]:
    variant = replace(VARIANT, schedule={**VARIANT.schedule, **(knobs or {})})
    state = Lowering(tvm.IRModule({"f": FUNC}), (), TARGET, variant, SCHEME, LAYOUT, tuned=Tuned("Some CPU", records))
    state = schedule_kernels(state)
    return state.mod["f"], state.kernels[0]


def test_a_hash_is_the_same_in_every_process_and_of_what_is_computed() -> None:
    op = op_of(FUNC)
    assert op is not None and kernel_hash(FUNC, op) == HASH and kernel_name(op) == "matmul 64x256 int4"
    other = definitions.matmul(SCHEME, LAYOUT, 64, 288, "float32")
    assert kernel_hash(other, op) != HASH
    again = tvm.ir.load_json(tvm.ir.save_json(FUNC))  # as the measuring process gets it
    found = op_of(again)
    assert found is not None and kernel_hash(again, found) == HASH


def test_a_record_takes_the_place_of_knobs_and_the_report_says_so() -> None:
    plain, report = scheduled()
    assert report.records == ()
    func, report = scheduled(tuned())
    expected, _ = scheduled(knobs=dict(FEW))
    assert tvm_ffi.structural_equal(func, expected) and not tvm_ffi.structural_equal(func, plain)
    assert report.records == ("few 1.25x on Some CPU @ 3 GHz, 2026-11-21",) and report.rule == "cpu.int8_matmul"
    info = KernelInfo(variants=("avx512_vnni",), **vars(report))
    assert KernelInfo.model_validate_json(info.model_dump_json()) == info


def test_records_of_several_ranges_of_rows_add_up() -> None:
    gemv = {"int8_prefetch_words": 32, "int8_gemv_streams": 2}
    func, report = scheduled(tuned(), tuned(bucket="gemv", knobs=gemv))
    expected, _ = scheduled(knobs={**FEW, **gemv})
    assert tvm_ffi.structural_equal(func, expected) and len(report.records) == 2


@pytest.mark.parametrize(
    "changes, words",
    (
        ({"knobs": {**FEW, "int8_dot": 1}}, "record for few ignored: unknown knob int8_dot"),
        ({"knobs": {**FEW, "int8_rows.few": 7}}, "int8_rows.few is 7, not one of 2, 3"),
        ({"knobs": {"int8_rows.few": 9}}, "int8_tail_rows.few is missing"),
        ({"knobs": {**FEW, "int8_tail_rows.few": 2}}, "2 rows in the last panels"),
        ({"knobs": {**FEW, "int8_blocks.few": 2}}, "36 sums do not fit 32 vector registers"),
        ({"bucket": "many"}, "the kernel has no range many"),
    ),
)
def test_a_record_that_does_not_fit_is_ignored_in_words(changes: dict[str, Any], words: str) -> None:
    plain, _ = scheduled()
    func, report = scheduled(tuned(**changes))
    assert tvm_ffi.structural_equal(func, plain)
    assert report.records == () and words in report.reason


@pytest.mark.parametrize(
    "changes", ({"kernel": "0" * 16}, {"rule": "cpu.matmul"}, {"variant": "avx2"}), ids=lambda c: next(iter(c))
)
def test_a_record_of_something_else_changes_nothing(changes: dict[str, Any]) -> None:
    plain, unchanged = scheduled()
    func, report = scheduled(tuned().model_copy(update=changes))
    assert tvm_ffi.structural_equal(func, plain) and report == unchanged


@pytest.mark.parametrize("name", ("vulkan", "vulkan-f16", "lavapipe", "nvidia", "webgpu", "webgpu-f16", "cuda"))
def test_every_default_of_a_gpu_is_in_its_space(name: str) -> None:
    target = load_target(name)
    for n, buckets in ((64, ["gemv", "gemm"]), (4096, ["gemv"])):
        definition = definitions.matmul(SCHEME, load_layout(target.weight_layout), n, 256, target.activation_dtype)
        op = op_of(definition)
        assert op is not None
        for rule in ("gpu.matmul", "gpu.subgroup_matmul"):
            found = spaces_of(target, rule, op, target.schedule)
            assert [space.bucket for space in found] == buckets
            assert [space.check(space.default) for space in found] == [""] * len(found)


@pytest.mark.parametrize("variant", TARGET.variants, ids=lambda v: f"{v.arch}-{v.name}")
@pytest.mark.parametrize("scheme", ("q4f16_1", "q8f16_1", "q0f16"))
def test_every_default_is_in_its_space(variant: Any, scheme: str) -> None:
    op = op_of(definitions.matmul(load_scheme(scheme), LAYOUT, 64, 256, "float32"))
    assert op is not None
    for rule in ("cpu.matmul",) if scheme == "q0f16" else ("cpu.int8_matmul", "cpu.matmul"):
        for space in spaces_of(TARGET, rule, op, variant.schedule):
            assert space.check(space.default) == ""
            assert sum(1 for _ in space.choices()) > 1
