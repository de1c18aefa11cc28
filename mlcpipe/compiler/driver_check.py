"""The kernels of `mlcpipe/devices/support/driver_check.py`. A library for a GPU contains them next to the model's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import te, tirx
from tvm.s_tir import dlight

from mlcpipe.compiler.build import build_kernels
from mlcpipe.devices.support.driver_check import COUNT, GROUP, MATRICES, PREFIX, ROWS, WIDTH
from mlcpipe.errors import CompileError
from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import KernelModule, Lowering
from mlcpipe.passes.pipeline import SHADERS, Phase
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from tir_schedules.gpu.matmul.subgroup import subgroup_matmul
from tir_schedules.op import op_of, with_facts
from tir_schedules.rule import Declined

# At most, of a workgroup: a device may have no more for a kernel of many registers.
_THREADS = {"max_num_threads": 256, "max_threads_per_block": 256}


def modules(scheduled: Lowering, *, float16: bool, kernel_phase: Phase = SHADERS) -> Sequence[Any]:
    """The kernels as modules to link next to a scheduled model; `kernel_phase` as in `build_kernels`."""
    target, knobs = scheduled.tvm_target, scheduled.variant.schedule
    # These kernels have TVM's schedules, so TVM's pipeline must insert the barriers.
    checks = [tvm.tirx.build(tvm.IRModule(functions(target, float16=float16)), target=target)]
    if knobs.get("matrix_rows"):
        checks.append(build_kernels(KernelModule(tvm.IRModule(matrices(knobs)), target), kernel_phase))
    return checks


def functions(target: Any, *, float16: bool) -> dict[str, tirx.PrimFunc]:
    """Scheduled functions by global symbol; their parameters are inputs, then the output. `float16` adds its checks."""
    functions = {"arithmetic": _arithmetic(), "integers": _integers(), "sums": _sums(), "maxima": _maxima()}
    functions["products"] = _products()
    if float16:
        functions["halves"] = _halves()
    named = {PREFIX + name: func.with_attr("global_symbol", PREFIX + name) for name, func in functions.items()}
    with tvm.target.Target({**json.loads(str(target)), **_THREADS}):
        rules = (dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.Fallback())
        module = dlight.ApplyDefaultSchedule(*rules)(tvm.IRModule(named))
    return {name: module[name] for name in named}


def matrices(knobs: Mapping[str, int | str]) -> dict[str, tirx.PrimFunc]:
    """The product on cooperative matrices, by global symbol. `knobs`: the `schedule` of a target that has them."""
    _, n, k = MATRICES
    product = definitions.matmul(load_scheme("q0f16"), load_layout("rows32_pairs"), n, k, "float16")
    op = op_of(with_facts(product, rows="many"))
    func = None if op is None else subgroup_matmul(op, "float16", knobs)
    if func is None or isinstance(func, Declined):
        raise CompileError("the driver check of matrices has no kernel", found=getattr(func, "reason", "no operation"))
    name = PREFIX + "matrices"
    return {name: func.with_attr("global_symbol", name)}


def _arithmetic() -> tirx.PrimFunc:
    a, b = (te.placeholder((COUNT,), "float32", name) for name in "ab")

    def formula(i: Any) -> Any:
        return a[i] * b[i] + tirx.exp(-tirx.abs(a[i])) / (tirx.sqrt(tirx.abs(b[i])) + tirx.const(1, "float32"))

    return te.create_prim_func([a, b, te.compute((COUNT,), formula)])


def _integers() -> tirx.PrimFunc:
    words = te.placeholder((COUNT // 8,), "uint32", "words")
    return te.create_prim_func([words, te.compute((COUNT,), lambda i: _code(words[i // 8], i) - 7)])


def _code(word: Any, i: Any) -> Any:
    shifted = tirx.shift_right(word, (i % 8 * 4).astype("uint32"))
    return tirx.bitwise_and(shifted, tirx.const(15, "uint32")).astype("int32")


def _sums() -> tirx.PrimFunc:
    return _rows(te.sum)


def _maxima() -> tirx.PrimFunc:
    return _rows(te.max)


def _rows(reduce: Callable[..., Any]) -> tirx.PrimFunc:
    x, k = te.placeholder((ROWS, WIDTH), "float32", "x"), te.reduce_axis((0, WIDTH), "k")
    return te.create_prim_func([x, te.compute((ROWS,), lambda row: reduce(x[row, k], axis=k))])


def _products() -> tirx.PrimFunc:
    codes = te.placeholder((ROWS, WIDTH // 8), "uint32", "codes")
    scales = te.placeholder((ROWS, WIDTH // GROUP), "float32", "scales")
    x, k = te.placeholder((WIDTH,), "float32", "x"), te.reduce_axis((0, WIDTH), "k")

    def term(row: Any) -> Any:
        return (_code(codes[row, k // 8], k) - 7).astype("float32") * scales[row, k // GROUP] * x[k]

    return te.create_prim_func([codes, scales, x, te.compute((ROWS,), lambda row: te.sum(term(row), axis=k))])


def _halves() -> tirx.PrimFunc:
    a, b = (te.placeholder((COUNT,), "float16", name) for name in "ab")
    return te.create_prim_func([a, b, te.compute((COUNT,), lambda i: a[i] * b[i] + a[i])])
