"""Heads times a Hadamard matrix, which spreads an outlier over the dimensions of a head."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.attention.pages import AttentionShape
from tir_schedules.cpu.attention.store_pages import for_tokens
from tir_schedules.cpu.vectors import read, scratch, splat, store, value


def rotate(shape: AttentionShape, name: str, heads: int, dim: int) -> tirx.PrimFunc:
    """x f32[n, heads, D] becomes x H.

    H is block-diagonal of Hadamard matrices of `rotated_dims` rows in Sylvester's order, divided by the root of that:
    orthogonal, symmetric, and its own inverse.
    """
    n = tirx.Var("n", "int64")
    arguments = {"x": Tensor((n, heads, dim), "float32", [(n * (heads * dim), "float32")])}

    def body(x: Buffer) -> None:
        def token(t: Expr) -> None:
            with I.serial(0, heads * dim // shape.rotated_dims) as block:
                _transform(x, value(t * (heads * dim) + block * shape.rotated_dims), shape.rotated_dims)

        for_tokens(n, token)

    return function(name, arguments, body)


def _transform(x: Buffer, begin: Expr, size: int) -> None:
    """The fast Walsh-Hadamard transform of x[begin : begin + size]: log2(size) steps of sums and differences."""
    work, stride = scratch(size), size // 2
    while stride:
        lanes = min(stride, 16)
        source, first = (x, begin) if 2 * stride == size else (work, 0)
        target, target_first = (x, begin) if stride == 1 else (work, 0)
        factor = splat(size**-0.5 if stride == 1 else 1.0, lanes)
        with I.serial(0, size // (2 * stride)) as pair, I.serial(0, stride // lanes) as i:
            at = pair * (2 * stride) + i * lanes
            a, b = (value(read(source, first + at + far, lanes)) for far in (0, stride))
            for far, sum_ in ((0, a + b), (stride, a - b)):
                store(target, target_first + at + far, sum_ * factor if stride == 1 else sum_, lanes)
        stride //= 2
