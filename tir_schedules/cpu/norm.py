"""RMS and layer norm for CPUs, with or without the residual addition before it: passes to sum, one to scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.cpu.vectors import Registers, load, read, scratch, splat, store
from tir_schedules.op import Op
from tir_schedules.rule import Declined, NamedRule, hand_written

_SERIAL = 8192  # numbers; waking threads for fewer costs more than the work


def norm(op: Op) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged norm in float32."""
    size, eps = op.int("size"), float(op.facts["eps"])
    if op.str("dtype") != "float32":
        return Declined(f"activations are {op.str('dtype')}")
    lanes = next((n for n in (16, 8, 4, 2) if size % n == 0), 0)
    if not lanes:
        return Declined(f"size {size} is odd")
    m = tirx.Var("m", "int64")
    rows, weight = Tensor((m, size), "float32"), Tensor((size,), op.str("weight_dtype"))

    vectors = {"w": weight, "bias": weight} if op.facts.get("biased") else {"w": weight}
    normalize = _standardize_row if "layer" in op.kind else _scale_row

    def plain(x: Buffer, *others: Buffer) -> None:
        *of_columns, y = others
        _each_row(m, size, lambda row: normalize(x, of_columns, y, row, lanes, eps))

    def of_sum(a: Buffer, b: Buffer, *others: Buffer) -> None:
        *of_columns, x, y = others

        def emit(row: Expr) -> None:
            with I.serial(size // lanes) as i:
                at = (row, i * lanes)
                store(x, at, read(a, at, lanes) + read(b, at, lanes), lanes)
            normalize(x, of_columns, y, row, lanes, eps)

        _each_row(m, size, emit)

    if not op.kind.startswith("add"):
        return function(op.kind, {"x": rows, **vectors, "y": rows}, plain)
    return function(op.kind, {"a": rows, "b": rows, **vectors, "x": rows, "y": rows}, of_sum)


def _each_row(m: Expr, size: int, emit: Callable[[Expr], None]) -> None:
    """emit(row) for m rows, on all threads where there is work for them."""
    with I.If(m * size <= I.int64(_SERIAL)):
        with I.Then(), I.serial(m) as row:
            emit(row)
        with I.Else(), I.parallel(m) as row:
            emit(row)


def _scale_row(x: Buffer, vectors: Sequence[Buffer], y: Buffer, row: Expr, lanes: int, eps: float) -> None:
    """y[row] = x[row] / sqrt(mean(x[row]^2) + eps) * w, with `lanes` partial sums."""
    (w,) = vectors
    size = int(w.shape[0])
    scale = _sum_row(size, lanes, lambda at: read(x, (row, at), lanes) * read(x, (row, at), lanes))
    put(scale, 0, I.float32(1) / I.sqrt(scale[0] / I.float32(size) + I.float32(eps)))
    with I.serial(size // lanes) as i:
        at = (row, i * lanes)
        store(y, at, read(x, at, lanes) * splat(scale[0], lanes) * load(w, i * lanes, lanes), lanes)


def _standardize_row(x: Buffer, vectors: Sequence[Buffer], y: Buffer, row: Expr, lanes: int, eps: float) -> None:
    """y[row] = (x[row] - mean) / sqrt(variance + eps) * w + bias, where there is a bias."""
    w, *bias = vectors
    size = int(w.shape[0])
    mean = _sum_row(size, lanes, lambda at: read(x, (row, at), lanes))
    put(mean, 0, mean[0] / I.float32(size))

    def centred(at: Expr) -> Expr:
        return read(x, (row, at), lanes) - splat(mean[0], lanes)

    scale = _sum_row(size, lanes, lambda at: centred(at) * centred(at))
    put(scale, 0, I.float32(1) / I.sqrt(scale[0] / I.float32(size) + I.float32(eps)))
    with I.serial(size // lanes) as i:
        normalized = centred(i * lanes) * splat(scale[0], lanes) * load(w, i * lanes, lanes)
        for one in bias:
            normalized = normalized + load(one, i * lanes, lanes)
        store(y, (row, i * lanes), normalized, lanes)


def _sum_row(size: int, lanes: int, term: Callable[[Expr], Expr]) -> Buffer:
    """One number, the sum of term(at), which are vectors of `lanes` elements from `at` on."""
    partial, total = Registers(1, lanes), scratch(1)
    partial[0] = splat(0.0, lanes)
    with I.serial(size // lanes) as i:
        partial[0] = partial[0] + term(i * lanes)
    put(total, 0, I.float32(0))
    with I.serial(lanes) as i:
        put(total, 0, total[0] + partial.memory[0, i])
    return total


_KINDS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
RULES = (NamedRule("cpu.norm", _KINDS, hand_written(lambda _, op, knobs: norm(op))),)
