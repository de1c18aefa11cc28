"""y[i, h] = x[i, h] w[h]^T for CPUs with integer dot products: the matrix of each head, x quantized in groups of 32.

The weight's rows are those of all heads in turn, so each tile of columns takes the panels of its head. A row's sums are
the same numbers whichever rows are beside it.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, kept
from tir_schedules.cpu.int8_activations import alloc_panels, quantize_group
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_few_rows import FewTiles, ask_ahead, direct_tile
from tir_schedules.cpu.int8_matmul import dot_of, tiles_of, unfit
from tir_schedules.cpu.int8_unpacked import fine_groups
from tir_schedules.cpu.packed_weight import LANES, Packed, packed_of
from tir_schedules.cpu.store import Output
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, hand_written


def int8_head_matmul(op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x f32[m, heads, columns], packed w [heads * n, k] -> y f32[m, heads, n]."""
    dot, w, heads = dot_of(knobs), packed_of(op), op.int("heads")
    if isinstance(dot, Declined):
        return dot
    if reason := unfit(op, w):
        return Declined(reason)
    if w.n // heads % LANES:
        return Declined(f"{w.n // heads} rows of a head")
    return _kernel(w, dot, tiles_of(knobs), heads, op.int("columns"))


@kept
def _kernel(w: Packed, dot: Dot, tiles: FewTiles, heads: int, columns: int) -> tirx.PrimFunc:
    m = tirx.Var("m", "int64")
    arguments = {
        "x": Tensor((m, heads, columns), "float32"),
        **w.arrays(),
        "y": Tensor((m, heads, w.n // heads), "float32"),
    }

    def body(x: Buffer, *rest: Buffer) -> None:
        *arrays, y = rest
        X = I.decl_buffer((m * heads, columns), "float32", data=x.data, elem_offset=0)
        Y = I.decl_buffer((m, w.n), "float32", data=y.data, elem_offset=0)
        weight, of_head = Weight(w, dot, *arrays), w.blocks // heads
        blocks = tiles.few.blocks if of_head % tiles.few.blocks == 0 else 1
        with I.If(m == I.int64(1)):
            with I.Then():
                _tiles(X, weight, Y, m, heads, 1, 1, tiles.prefetch_words)
            with I.Else():
                _tiles(X, weight, Y, m, heads, tiles.few.rows, blocks, 0)

    return function("head_matmul", arguments, body)


def _tiles(
    X: Buffer, weight: Weight, Y: Buffer, m: Expr, heads: int, rows: int, blocks: int, ahead: int
) -> None:  # fmt: skip
    """Emit Y = X W^T in tiles of `rows` by `blocks` of 16 columns; codes are asked for `ahead` words before."""
    groups, count, of_head = fine_groups(weight), I.bind((m + rows - 1) // rows), weight.packed.blocks // heads
    panels = alloc_panels(groups, count * heads, rows)
    with I.parallel(count * heads) as i, I.serial(rows) as r, I.serial(groups.count) as g:
        quantize_group(X, I.min(i // heads * rows + r, m - 1) * heads + i % heads, g, panels, i, r)
    with I.parallel(weight.packed.blocks // blocks) as t, I.serial(count) as panel:
        out = Output(Y, panel * rows, m, t * blocks, rows, blocks)
        direct_tile(panels, panel * heads + t * blocks // of_head, weight, out, ask_ahead(weight, ahead))


RULES = (
    NamedRule(
        "cpu.int8_head_matmul",
        ("head_matmul",),
        hand_written(lambda _, op, knobs: int8_head_matmul(op, knobs)),
        before="cpu.head_matmul",
    ),
)
