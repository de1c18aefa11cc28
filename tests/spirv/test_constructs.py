"""Memory, control flow, subgroups, launches: kernels written by hand, and what is refused."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as I

from mlcpipe.compiler.backends.spirv import codegen as build
from mlcpipe.compiler.backends.spirv.intrinsics import PREFIX
from mlcpipe.compiler.backends.spirv.kernel import compile_kernel
from mlcpipe.errors import CompileError
from mlcpipe.nn import definitions
from tests.kernels.cases.gpu.case import by_rules
from tests.kernels.devices import vulkan
from tests.spirv import harness
from tests.spirv.harness import Array
from tir_schedules.builder import Tensor, function, put
from tir_schedules.gpu import device_calls as calls
from tir_schedules.gpu.kernel import barrier, keep, launch, local, shared

N = 256
Body = Callable[..., None]


def _vectors(dtype: str, lanes: int, offset: int) -> Body:
    """y = x + x in vectors that begin at `offset`: 0 is a multiple of every width, 1 of none."""

    def body(x: Any, y: Any) -> None:
        with launch(8, 2) as (bx, _, tx):
            at = keep((bx * 8 + tx) * lanes + offset)
            run = tirx.Ramp(at, 1, lanes)
            I.buffer_store(y, x[run] + x[run], [run])

    return body


def _control(x: Any, y: Any) -> None:
    """y = the sum of the odd numbers below x that are no multiple of 7, up to the first beyond 40."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        total, i = local(1, "int32"), local(1, "int32")
        put(total, 0, 0)
        put(i, 0, 0)
        with I.While(i[0] < x[at]):
            put(i, 0, i[0] + 1)
            with I.If(i[0] % 2 == 0), I.Then():
                I.evaluate(tirx.continue_loop())
            with I.If(i[0] > 40), I.Then():
                I.evaluate(tirx.break_loop())
            with I.If(i[0] % 7 == 0):
                with I.Then():
                    put(total, 0, total[0] + 0)
                with I.Else():
                    put(total, 0, total[0] + i[0])
        with I.serial(0, x[at] // 64) as j:
            put(total, 0, total[0] + j)
        put(y, at, total[0])


def _control_reference(x: Array) -> Array:
    def one(limit: int) -> int:
        odd = [i for i in range(1, max(limit, 0) + 1) if i % 2]
        below = [i for i in odd if i <= 40]
        return sum(i for i in below if i % 7) + sum(range(max(limit // 64, 0)))

    return np.array([one(int(v)) for v in x], np.int32)


def _reversed(x: Any, y: Any) -> None:
    """Each workgroup's part reversed, through shared memory."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        scratch = shared(harness.THREADS, "float16")
        put(scratch, tx, x[bx * harness.THREADS + tx])
        barrier()
        put(y, bx * harness.THREADS + tx, scratch[harness.THREADS - 1 - tx])


def _subgroups(x: Any, y: Any) -> None:
    """y = sum over 4 lanes + 1000 max over 4 lanes + 1000000 the neighbour's."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        value = keep(x[at])
        total, top = keep(calls.subgroup_add(value, 4)), keep(calls.subgroup_max(value, 4))
        put(y, at, total + 1000 * top + 1000000 * calls.subgroup_shuffle_xor(value, 1))


def _subgroups_reference(x: Array) -> Array:
    fours = x.reshape(-1, 4)
    total, top = np.repeat(fours.sum(1), 4), np.repeat(fours.max(1), 4)
    return (total + 1000 * top + 1000000 * x.reshape(-1, 2)[:, ::-1].ravel()).astype(np.int32)


def _whole_subgroup(x: Any, y: Any) -> None:
    """y = the subgroup's sum as the last lane has it - the sum + lane % 4."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        value = keep(x[at])
        last = keep(calls.subgroup_max(calls.lane()))
        total = keep(calls.subgroup_broadcast(keep(calls.subgroup_exclusive_add(value) + value), last))
        put(y, at, total - keep(calls.subgroup_add(value)) + calls.lane() % 4)


def _eighth_sums(x: Any, y: Any) -> None:
    """y = the sum of each 8 neighbours, in subgroups of 8."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        I.evaluate(calls.require_size(8))
        at = keep(bx * harness.THREADS + tx)
        put(y, at, calls.subgroup_add(x[at]))


def _viewed(x: Any, y: Any) -> None:
    """The bits of float16 numbers, read as halves of uint32."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        words = I.decl_buffer((N // 2,), "uint32", data=x.data)
        put(y, at, I.bitwise_and(I.shift_right(words[at // 2], I.cast(at % 2 * 16, "uint32")), I.uint32(0xFFFF)))


def _packed_bytes(x: Any, y: Any) -> None:
    """Four int8 as one word, through a vector load and a reinterpretation."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        put(y, at, tirx.reinterpret("int32", x[tirx.Ramp(at * 4, 1, 4)]))


def _rounded(x: Any, y: Any) -> None:
    """x * x - rounded(x * x): 0, if the product is rounded before the difference."""
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        at = keep(bx * harness.THREADS + tx)
        put(y, at, _exact(x[at] * x[at] - keep(_exact(x[at] * x[at]))))


def _exact(x: Any) -> Any:
    return tirx.call_pure_extern("float32", PREFIX + "exact", x)


def _first_columns(x: Any, scale: Any, y: Any) -> None:
    with launch(harness.THREADS, N // harness.THREADS) as (bx, _, tx):
        put(y, bx * harness.THREADS + tx, I.cast(x[bx * harness.THREADS + tx], "float32") * I.cast(scale, "float32"))


def _random(dtype: str, count: int = N, low: int = -100, high: int = 100) -> Array:
    return np.random.default_rng(count).integers(low, high, count).astype(dtype)


_BYTES = _random("int8", 4 * N)
# Name -> (arguments: dtype or values and dtype of the output, body, expected)
KERNELS: dict[str, tuple[list[Array], Array, Body]] = {
    "control flow": ([_random("int32", high=300)], _control_reference(_random("int32", high=300)), _control),
    "shared memory": (
        [_random("float16")],
        _random("float16").reshape(-1, harness.THREADS)[:, ::-1].reshape(-1),
        _reversed,
    ),
    "clusters of a subgroup": ([_random("int32", low=0, high=90)], _subgroups_reference(_random("int32", low=0, high=90)), _subgroups),
    "a whole subgroup": ([_random("int32", low=0)], (np.arange(N) % 4).astype(np.int32), _whole_subgroup),
    "a view": ([_random("float16")], _random("float16").view(np.uint16).astype(np.uint32), _viewed),
    "bytes as words": ([_BYTES], _BYTES.view(np.int32), _packed_bytes),
    "rounded products": ([_random("float32") / np.float32(7)], np.zeros(N, np.float32), _rounded),
}  # fmt: skip
for _dtype in ("float32", "float16", "int8"):
    for _lanes in (2, 3, 4, 8, 16):
        for _offset in (0, 1):
            _x = _random(_dtype, 16 * _lanes + _offset, -50, 50)
            _y = np.where(np.arange(_x.size) < _offset, 0, _x + _x).astype(_dtype)
            KERNELS[f"{_lanes} x {_dtype} at {_offset}"] = ([_x], _y, _vectors(_dtype, _lanes, _offset))


def _function(name: str) -> tirx.PrimFunc:
    inputs, output, body = KERNELS[name]
    arguments = {f"x{i}": Tensor(x.shape, str(x.dtype)) for i, x in enumerate(inputs)}
    return function("main", {**arguments, "y": Tensor(output.shape, str(output.dtype))}, body)


def _eighths() -> tirx.PrimFunc:
    return function("main", {"x": Tensor((N,), "float16"), "y": Tensor((N,), "float16")}, _eighth_sums)


def test_subgroups_of_a_required_size(device: None) -> None:
    if tvm.device("vulkan", 0).warp_size != 8:
        pytest.skip("the device's subgroups have other sizes than 8")
    x = _random("float16", low=-9, high=9)
    (found,) = harness.run(_eighths(), [x, np.zeros_like(x)], [1])
    np.testing.assert_array_equal(found, np.repeat(x.reshape(-1, 8).sum(1), 8))


@harness.needs_tools
def test_kernels_are_valid(tmp_path: Path) -> None:
    functions = {f"k{i}": _function(name).with_attr("global_symbol", f"k{i}") for i, name in enumerate(KERNELS)}
    harness.check(harness.kernels(tvm.IRModule(functions)), tmp_path)


def test_kernels_give_the_numbers_of_numpy(device: None) -> None:
    build.register()
    functions = {f"k{i}": _function(name).with_attr("global_symbol", f"k{i}") for i, name in enumerate(KERNELS)}
    compiled = tvm.compile(tvm.IRModule(functions), target=harness.TARGET)
    target = tvm.device("vulkan", 0)
    for i, (name, (inputs, expected, _)) in enumerate(KERNELS.items()):
        output = tvm.runtime.tensor(np.zeros_like(expected), target)
        compiled[f"k{i}"](*(tvm.runtime.tensor(np.ascontiguousarray(x), target) for x in inputs), output)
        np.testing.assert_array_equal(output.numpy(), expected, err_msg=name)


def _scaled(dtype: str) -> tirx.PrimFunc:
    arguments = {"x": Tensor((N,), "int32"), "scale": dtype, "y": Tensor((N,), "float32")}
    return function("main", arguments, _first_columns)


SCALARS = {"float16": 0.5, "float64": 0.25, "int8": -3, "int64": 1 << 20, "bool": 1, "uint16": 65535}


@harness.needs_tools
def test_kernels_with_numbers_are_valid(tmp_path: Path) -> None:
    found = [kernel for dtype in SCALARS for kernel in harness.kernels(_scaled(dtype))]
    harness.check(found, tmp_path)


@pytest.mark.parametrize("dtype", SCALARS)
def test_numbers_as_arguments(device: None, dtype: str) -> None:
    x, value = _random("int32"), SCALARS[dtype]
    (found,) = harness.run(_scaled(dtype), [x, value, np.zeros(N, np.float32)], [2])
    np.testing.assert_array_equal(found, x.astype(np.float32) * np.float32(value))


def _wide_grid(groups: Any) -> tirx.PrimFunc:
    def body(y: Any) -> None:
        with launch(1, groups) as (bx, _, _tx):
            put(y, bx, bx + 1)

    return function("main", {"y": Tensor((groups,), "int32")}, body)


@pytest.mark.parametrize("groups", [70_000, 131_073])
@pytest.mark.parametrize("own", [False, True])
def test_a_grid_beyond_65535_covers_all(device: None, groups: int, own: bool) -> None:
    kernel = _wide_grid(tirx.Var("n", "int32") if own else groups)
    (found,) = harness.run(kernel, [np.zeros(groups, np.int32)], [0], own=own)
    np.testing.assert_array_equal(found, np.arange(groups) + 1)


def test_push_constants_hold_a_base_only_for_wide_or_unknown_grids() -> None:
    (small,) = harness.kernels(_wide_grid(65534))
    (wide,) = harness.kernels(_wide_grid(65536))
    unknown = _wide_grid(tirx.Var("n", "int32")).with_attr("global_symbol", "main")
    (dynamic,) = harness.kernels(unknown)
    (own,) = harness.own_kernels(tvm.IRModule({"main": unknown}))
    assert (small.grid_base, small.push_constant_bytes) == (None, 0)
    assert (wide.grid_base, wide.push_constant_bytes) == (0, 4)
    assert dynamic.grid_base == 4 and dynamic.scalars[0].stored == "int32"
    assert own.grid_base is not None


@harness.needs_tools
def test_aligned_vectors_are_one_load() -> None:
    for name, loads in (
        ("4 x float32 at 0", 1),
        ("8 x float32 at 0", 2),
        ("4 x float32 at 1", 4),
        ("2 x float16 at 0", 1),
    ):
        (kernel,) = harness.kernels(_function(name))
        found = [line for line in harness.disassembled(kernel).splitlines() if "OpLoad" in line and "uint" not in line]
        assert len(found) == loads, (name, found)


def test_features_are_those_that_the_code_needs() -> None:
    def features(name: str) -> set[str]:
        (kernel,) = harness.kernels(_function(name))
        return set(kernel.features)

    assert features("4 x float32 at 0") == set()
    assert features("4 x float16 at 0") == {"shaderFloat16", "storageBuffer16BitAccess"}
    assert features("clusters of a subgroup") == {"subgroupBasic", "subgroupShuffle"}
    (sums,) = harness.kernels(_eighths())
    assert set(sums.features) >= {"subgroupArithmetic", "shaderSubgroupExtendedTypes"} and sums.subgroup_size == 8
    # Numbers that are only converted need no arithmetic of their size.
    widened = harness.elementwise(["float16", "int8"], lambda a, b: a.astype("float32") * b.astype("float32"))
    (kernel,) = harness.kernels(widened)
    assert set(kernel.features) == {"storageBuffer16BitAccess", "storageBuffer8BitAccess"}


def test_writes_are_told_from_reads() -> None:
    (kernel,) = harness.kernels(_function("shared memory"))
    assert [(b.arg, b.write) for b in kernel.buffers] == [(0, False), (1, True)]
    assert kernel.workgroup == (harness.THREADS, 1, 1)
    assert kernel.shared_bytes == 2 * harness.THREADS


@harness.needs_tools
def test_what_is_written_and_read_is_coherent() -> None:
    """A norm of a sum reads the sum that it wrote, which NVIDIA's driver lets it do in no other buffer."""
    func = by_rules(definitions.add_rms_norm(100, 1e-5, "float32", "float32"), vulkan.knobs(8, True))
    (kernel,) = harness.own_kernels(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))
    decorated = re.findall(r"OpDecorate %buffer(\d+) (Coherent|NonWritable|Restrict)", harness.disassembled(kernel))
    of = {number: {kind for other, kind in decorated if other == number} for number, _ in decorated}
    assert sorted(map(sorted, of.values())) == [["Coherent"], *[["NonWritable", "Restrict"]] * 3, ["Restrict"]]


@harness.needs_tools
def test_names_of_the_source_are_in_the_code() -> None:
    (kernel,) = harness.kernels(harness.elementwise(["float32"], lambda x: x + x))
    text = harness.disassembled(kernel)
    assert f'OpString "{kernel.name}"' in text and 'OpName %x0 "x0"' in text


def test_the_container_is_what_the_runtime_reads() -> None:
    found = harness.kernels(_function("shared memory")) + harness.kernels(_wide_grid(70_000))
    raw = build.container(found)
    (size,) = struct.unpack_from("<Q", raw)
    assert size % 8 == 0
    header = json.loads(raw[8 : 8 + size])
    assert header["format"] == 1
    for entry, kernel in zip(header["kernels"], found):
        at = 8 + size + entry["spirv_offset"]
        assert raw[at : at + entry["spirv_bytes"]] == kernel.code and at % 4 == 0
        assert struct.unpack_from("<I", raw, at) == (0x07230203,)
        assert entry["entry"] == "main" and entry["launch_params"][0] == "blockIdx.x"
    assert header["kernels"][1]["grid_base"] == {"offset": 0}


# What is refused


def _refused(body: Body, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(CompileError, match=f"kernel cannot be written as SPIR-V in main_kernel.*{match}"):
        harness.kernels(function("main", arguments, body))


def test_an_unknown_call_is_named() -> None:
    def body(y: Any) -> None:
        with launch(1, 1) as (_bx, _, tx):
            put(y, tx, I.call_extern("float32", "tex2D", I.float32(1)))

    _refused(body, {"y": Tensor((1,), "float32")}, "call of tex2D")


def test_elementary_functions_of_float64_are_refused() -> None:
    def body(y: Any) -> None:
        with launch(1, 1) as (_bx, _, tx):
            put(y, tx, tirx.exp(y[tx]))

    _refused(body, {"y": Tensor((1,), "float64")}, "exp of float64")


def test_more_numbers_than_push_constants_are_refused() -> None:
    def body(*arguments: Any) -> None:
        *numbers, y = arguments
        with launch(1, 1) as (_bx, _, tx):
            put(y, tx, sum(numbers[1:], numbers[0]))

    arguments: dict[str, Any] = {f"n{i}": "float32" for i in range(33)}
    _refused(body, {**arguments, "y": Tensor((1,), "float32")}, "33 numbers as arguments, 132 bytes; 128 are possible")


def test_a_barrier_of_the_grid_is_refused() -> None:
    def body(y: Any) -> None:
        with launch(1, 1) as (_bx, _, tx):
            I.evaluate(I.tvm_storage_sync("global"))
            put(y, tx, 1.0)

    with pytest.raises(CompileError, match="barrier of scope global"):
        harness.kernels(function("main", {"y": Tensor((1,), "float32")}, body))


def test_limits_of_the_target_are_kept() -> None:
    def body(y: Any) -> None:
        with launch(512, 1) as (_bx, _, tx):
            put(y, tx, 1.0)

    with pytest.raises(CompileError, match="too many invocations of a workgroup.*expected at most 256; found 512"):
        harness.kernels(function("main", {"y": Tensor((512,), "float32")}, body))


def test_a_variable_that_nothing_defines_is_named() -> None:
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name("main")
        y = I.match_buffer(I.arg("y", I.handle()), (1,), "int32")
        with launch(1, 1) as (_bx, _, tx):
            put(y, tx, tirx.Var("ghost", "int32"))
    func = builder.get().with_attr("tirx.kernel_launch_params", [])
    with pytest.raises(CompileError, match="in a_name; found"):
        compile_kernel(func, "a_name")


@harness.needs_tools
def test_what_a_loop_does_not_change_is_computed_before_it() -> None:
    def body(x: Any, y: Any) -> None:
        with launch(1, 4) as (bx, _, _tx), I.serial(0, 8) as i, I.serial(0, 8) as j:
            put(y, (bx * 13 + i) * 8 + j, x[(bx * 13 + i) * 8 + j])

    (kernel,) = harness.kernels(function("main", {"x": Tensor((512,), "int32"), "y": Tensor((512,), "int32")}, body))
    before, _, loops = harness.disassembled(kernel).partition("OpLoopMerge")
    outer, _, inner = loops.partition("OpLoopMerge")
    assert (before.count("OpIMul"), outer.count("OpIMul"), inner.count("OpIMul")) == (1, 1, 0)
