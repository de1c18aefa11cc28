"""Matmul with packed weights, without subgroups: GEMV for few rows of x, tiled GEMM for many."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.builder import Buffer, Expr, Tensor, f32, function, put
from tir_schedules.gpu.kernel import by_rows, ceildiv, keep, launch, workspace
from tir_schedules.gpu.matmul.gemm import gemm, gemm_shape
from tir_schedules.gpu.matmul.gemv import SUMS, GemvShape, gemv, gemv_shape
from tir_schedules.gpu.matmul.packed import Rows, is_lm_head, packed
from tir_schedules.gpu.matmul.row_tile import RowTiles, by_tiles
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x dtype[m, k], packed w [n, k] -> x w^T dtype[m, n]: few rows by GEMV, many by GEMM.

    For `gated_matmul` a second kernel multiplies the activation of the first half of the columns by the second half.
    """
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m = tirx.Var("m", "int32")
    gated = op.kind == "gated_matmul"
    sizes = weight.sizes(arguments=bool(knobs.get("sizes_as_arguments", 0)))
    width = sizes.n // 2 if gated else sizes.n
    arguments = {"x": Tensor((m, sizes.k), dtype), **weight.arguments(sizes), "y": Tensor((m, width), dtype)}

    def shape_of(tiles: RowTiles) -> GemvShape:
        return gemv_shape(weight, knobs).of_rows(tiles.rows, knobs)

    def product(rows: Rows, x: Buffer, y: Buffer) -> None:
        def few() -> None:
            by_tiles(op, m, knobs, SUMS, lambda tiles: _gemv(rows, shape_of(tiles), x, y, tiles))

        if not gated and is_lm_head(weight.n, weight.k):
            few()
            return
        by_rows(op, m, few, lambda: gemm(rows, m, x, y, gemm_shape(weight, knobs)))

    def body(x: Buffer, *rest: Buffer) -> None:
        rows, y = Rows(weight, sizes, rest[:-1]), rest[-1]
        if not gated:
            product(rows, x, y)
            return
        both, threads = workspace((m, sizes.n), dtype), int(knobs["elementwise_threads"])
        product(rows, x, both)
        activation = ACTIVATIONS[op.str("activation")]
        with launch(threads, ceildiv(width, threads), m) as (bx, i, tx):
            j = keep(bx * threads + tx)
            with I.If(j < width), I.Then():
                put(y, (i, j), activation(keep(f32(both[i, j]))) * f32(both[i, j + width]))

    return function("matmul", arguments, body)


def _gemv(rows: Rows, shape: GemvShape, x: Buffer, y: Buffer, tiles: RowTiles) -> None:
    """Launch the products of all rows of x, in tiles."""
    with tiles.launch(shape.threads, ceildiv(rows.sizes.blocks, shape.blocks)) as (bx, tile, tx):

        def store(i: int, row: Expr, value: Expr) -> None:
            with tiles.stored(tile, i):
                put(y, (tile * tiles.rows + i, row), value)

        xs = [lambda at, i=i: x[i, at] for i in tiles.of(tile)]  # type: ignore[misc]
        gemv(rows, shape, bx, tx, xs, store)


RULES = (NamedRule("gpu.matmul", ("matmul", "gated_matmul"), with_output_dtype(matmul)),)
