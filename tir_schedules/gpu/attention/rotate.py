"""Heads times a Hadamard matrix, which spreads an outlier over the dimensions of a head."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, f32, function, put
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, launch, shared

_THREADS = 64


def rotate(shape: AttentionShape, name: str, heads: int, dim: int) -> tirx.PrimFunc:
    """x [n, heads, D] becomes x H, as `cpu/attention/rotate.py` says. A workgroup has a head of a row."""
    n = tirx.Var("n", "int64")
    threads = min(_THREADS, dim // 2)
    arguments: dict[str, Argument] = {"x": Tensor((n, heads, dim), shape.row_dtype)}

    def body(x: Buffer) -> None:
        with launch(threads, n, heads) as (row, head, tx):
            work, stride = shared(dim), shape.rotated_dims // 2
            with I.serial(0, ceildiv(dim, threads)) as i, I.If(i * threads + tx < dim), I.Then():
                put(work, i * threads + tx, f32(x[row, head, i * threads + tx]))
            while stride:
                barrier()
                with I.serial(0, ceildiv(dim // 2, threads)) as i, I.If(i * threads + tx < dim // 2), I.Then():
                    at = keep((i * threads + tx) // stride * (2 * stride) + (i * threads + tx) % stride)
                    _step(shape, x if stride == 1 else None, work, (row, head, at), stride)
                stride //= 2

    return function(name, arguments, body)


def _step(shape: AttentionShape, x: Buffer | None, work: Buffer, where: tuple[Expr, Expr, Expr], stride: int) -> None:
    """The sum and the difference of two numbers of `work` in their places; the last ones go to `x`."""
    row, head, at = where
    a, b = keep(work[at]), keep(work[at + stride])
    for place, number in ((at, a + b), (at + stride, a - b)):
        if x is None:
            put(work, place, number)
        else:
            put(x, (row, head, place), number * I.float32(shape.rotated_dims**-0.5))
