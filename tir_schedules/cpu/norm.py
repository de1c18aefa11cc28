"""RMS norm for CPUs, with or without the residual addition before it: one pass to sum squares, one to scale."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.cpu.vectors import Registers, load, read, scratch, splat, store
from tir_schedules.op import Op
from tir_schedules.rule import Declined, NamedRule, hand_written

_SERIAL = 8192  # numbers; waking threads for fewer costs more than the work


def norm(op: Op) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `rms_norm` or `add_rms_norm` in float32."""
    size, eps = op.int("size"), float(op.facts["eps"])
    if op.str("dtype") != "float32":
        return Declined(f"activations are {op.str('dtype')}")
    lanes = next((n for n in (16, 8, 4, 2) if size % n == 0), 0)
    if not lanes:
        return Declined(f"size {size} is odd")
    m = tirx.Var("m", "int64")
    rows, weight = Tensor((m, size), "float32"), Tensor((size,), op.str("weight_dtype"))

    def rms_norm(x: Buffer, w: Buffer, y: Buffer) -> None:
        _each_row(m, size, lambda row: _scale_row(x, w, y, row, lanes, eps))

    def add_rms_norm(a: Buffer, b: Buffer, w: Buffer, x: Buffer, y: Buffer) -> None:
        def emit(row: Expr) -> None:
            with I.serial(size // lanes) as i:
                at = (row, i * lanes)
                store(x, at, read(a, at, lanes) + read(b, at, lanes), lanes)
            _scale_row(x, w, y, row, lanes, eps)

        _each_row(m, size, emit)

    if op.kind == "rms_norm":
        return function("rms_norm", {"x": rows, "w": weight, "y": rows}, rms_norm)
    return function("add_rms_norm", {"a": rows, "b": rows, "w": weight, "x": rows, "y": rows}, add_rms_norm)


def _each_row(m: Expr, size: int, emit: Callable[[Expr], None]) -> None:
    """emit(row) for m rows, on all threads where there is work for them."""
    with I.If(m * size <= I.int64(_SERIAL)):
        with I.Then(), I.serial(m) as row:
            emit(row)
        with I.Else(), I.parallel(m) as row:
            emit(row)


def _scale_row(x: Buffer, w: Buffer, y: Buffer, row: Expr, lanes: int, eps: float) -> None:
    """y[row] = x[row] / sqrt(mean(x[row]^2) + eps) * w, with `lanes` partial sums."""
    size = int(w.shape[0])
    partial, scale = Registers(1, lanes), scratch(1)
    partial[0] = splat(0.0, lanes)
    with I.serial(size // lanes) as i:
        partial[0] = partial[0] + read(x, (row, i * lanes), lanes) * read(x, (row, i * lanes), lanes)
    put(scale, 0, I.float32(0))
    with I.serial(lanes) as i:
        put(scale, 0, scale[0] + partial.memory[0, i])
    put(scale, 0, I.float32(1) / I.sqrt(scale[0] / I.float32(size) + I.float32(eps)))
    with I.serial(size // lanes) as i:
        at = (row, i * lanes)
        store(y, at, read(x, at, lanes) * splat(scale[0], lanes) * load(w, i * lanes, lanes), lanes)


RULES = (NamedRule("cpu.norm", ("rms_norm", "add_rms_norm"), hand_written(lambda _, op, knobs: norm(op))),)
