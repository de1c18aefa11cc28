"""y[i] = x[i'] w[expert of i]^T for CPUs with integer dot products: mixture-of-experts layers over packed weights.

One token streams the weights of its experts once, all rows and columns in parallel. More tokens are sorted by expert
(a counting sort), so that the rows of an expert share its weights in panels, as in `int8_matmul.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, add, function, kept, put
from tir_schedules.cpu.expert_matmul import Experts, experts_of
from tir_schedules.cpu.int8_activations import Groups, alloc_panels, quantize_group
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_few_rows import FewTiles, ask_ahead, direct_tile, streams
from tir_schedules.cpu.int8_gemm import Int8Tile
from tir_schedules.cpu.int8_matmul import dot_of, tiles_of, unfit
from tir_schedules.cpu.int8_unpacked import fine_groups
from tir_schedules.cpu.packed_weight import Packed, packed_of
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import scratch
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, hand_written


def int8_expert_matmul(op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x f32[m or m * top, K], packed W [experts], ids i32[m, top] -> y f32[m * top, N]."""
    dot, w = dot_of(knobs), packed_of(op)
    if isinstance(dot, Declined):
        return dot
    reason = unfit(op, w)
    if reason:
        return Declined(reason)
    return _kernel(w, dot, tiles_of(knobs), experts_of(op))


@kept
def _kernel(w: Packed, dot: Dot, tiles: FewTiles, experts: Experts) -> tirx.PrimFunc:
    m = tirx.Var("m", "int64")
    arguments = {
        "x": Tensor((m * experts.x_rows, w.k), "float32"),
        **experts.tensors(w),
        "ids": Tensor((m, experts.top), "int32"),
        "y": Tensor((m * experts.top, w.n), "float32"),
    }

    def body(X: Buffer, *rest: Buffer) -> None:
        *arrays, ids, Y = rest
        weight = Weight(w, dot, *experts.flat(w, arrays))
        groups = fine_groups(weight)
        with I.If(m == I.int64(1)):
            with I.Then():
                _one_token(X, weight, ids, Y, experts, groups, tiles)
            with I.Else():
                _many_tokens(X, weight, ids, Y, m, experts, groups, tiles.few)

    return function("kernel", arguments, body)


def _one_token(
    X: Buffer, weight: Weight, ids: Buffer, Y: Buffer, experts: Experts, groups: Groups, tiles: FewTiles
) -> None:
    """The experts of one token, each a GEMV."""
    panels, (together, apart) = alloc_panels(groups, experts.x_rows, 1), streams(weight, tiles)
    with I.serial(experts.x_rows) as i, I.serial(groups.count) as g:
        quantize_group(X, i, g, panels, i, 0)
    with I.parallel(experts.top * apart) as task:
        choice = I.bind(task // apart)
        expert = I.bind(experts.nearest(ids[0, choice]))
        out = Output(Y, choice, experts.top, task % apart, 1, together, apart=apart)
        ask = ask_ahead(weight, tiles.prefetch_words)
        direct_tile(panels, choice if experts.x_rows > 1 else 0, weight, out, ask, expert)


@dataclass(frozen=True)
class _Sorted:
    """Pairs (token, choice) sorted by expert: panel p has pairs[first[p] : end[p]], all of expert[p]."""

    pairs: Buffer
    first: Buffer
    end: Buffer
    expert: Buffer
    count: Buffer


def _sort_by_expert(ids: Buffer, m: Expr, experts: Experts, rows: int) -> _Sorted:
    """A counting sort, and panels of up to `rows` pairs."""
    most = (m * experts.top + rows - 1) // rows + experts.count
    pairs = scratch(m * experts.top, "int32")
    first, end, expert = (scratch(most, "int32") for _ in range(3))
    count, fill = scratch(1, "int32"), scratch(experts.count + 1, "int32")
    # Step 1: fill[e] = how many pairs come before those of expert e.
    with I.serial(experts.count + 1) as e:
        put(fill, e, 0)
    with I.serial(m * experts.top) as i:
        add(fill, experts.chosen(ids, i) + 1, 1)
    with I.serial(experts.count) as e:
        add(fill, e + 1, fill[e])
    # Step 2: panels.
    put(count, 0, 0)
    with I.serial(experts.count) as e, I.serial((fill[e + 1] - fill[e] + rows - 1) // rows) as p:
        put(first, count[0], fill[e] + p * rows)
        put(end, count[0], I.min(fill[e] + (p + 1) * rows, fill[e + 1]))
        put(expert, count[0], e)
        add(count, 0, 1)
    # Step 3: the pairs in order.
    with I.serial(m * experts.top) as i:
        put(pairs, fill[experts.chosen(ids, i)], I.cast(i, "int32"))
        add(fill, experts.chosen(ids, i), 1)
    return _Sorted(pairs, first, end, expert, count)


def _many_tokens(
    X: Buffer, weight: Weight, ids: Buffer, Y: Buffer, m: Expr, experts: Experts, groups: Groups, tile: Int8Tile
) -> None:
    """Rows in panels of one expert each; a thread takes columns, so that all share an expert's weights in time."""
    by_expert = _sort_by_expert(ids, m, experts, tile.rows)
    panels = alloc_panels(groups, (m * experts.top + tile.rows - 1) // tile.rows + experts.count, tile.rows)
    with I.parallel(by_expert.count[0]) as p, I.serial(tile.rows) as r:
        pair = I.bind(by_expert.pairs[I.min(by_expert.first[p] + r, by_expert.end[p] - 1)])
        with I.serial(groups.count) as g:
            quantize_group(X, experts.row(pair), g, panels, p, r)

    def multiply(p: Expr, t: Expr, rows: int) -> None:
        first, end = by_expert.first[p], by_expert.end[p]
        out = Output(Y, first, end, t * tile.blocks, rows, tile.blocks, index=by_expert.pairs)
        direct_tile(panels, p, weight, out, ask_ahead(weight, 0), by_expert.expert[p])

    with (
        I.parallel(-(-weight.packed.blocks // tile.blocks)) as t,
        I.serial(by_expert.count[0]) as p,
        I.If(by_expert.end[p] - by_expert.first[p] == 1),
    ):
        with I.Then():
            multiply(p, t, 1)
        with I.Else():
            multiply(p, t, tile.rows)


RULES = (
    NamedRule(
        "cpu.int8_expert_matmul",
        ("expert_matmul",),
        hand_written(lambda _, op, knobs: int8_expert_matmul(op, knobs)),
        before="cpu.expert_matmul",
    ),
)
