"""Prefill attention without matrix units: an invocation has some rows, and sums of them in registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.gpu.attention.pages import Row, for_dims
from tir_schedules.gpu.attention.prefill_tile import Tile
from tir_schedules.gpu.attention.scores import score_of, store_sum, with_sink
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, keep, local, shared


@dataclass(frozen=True)
class Keys:
    """What a tile attends to: tokens begin ... end - 1 of a sequence.

    `k(token)` and `v(token)` are rows. `seen(query, token)`: whether a query, counted in the sequence's
    chunk, sees a token.
    """

    begin: Expr
    end: Expr
    k: Callable[[Expr], Row]
    v: Callable[[Expr], Row]
    seen: Callable[[Expr, Expr], Expr]


@dataclass(frozen=True)
class Operands:
    """Tensors of the kernel. The first heads of a row of q are queries. `sinks`: none, or logits f32[heads]."""

    q: Buffer
    out: Buffer
    lse: Buffer | None
    scale: Expr
    sinks: Sequence[Buffer] = ()


def attend(tile: Tile, keys: Keys, tensors: Operands) -> None:
    """out = weighted mean of the values that each row sees, lse = log2 of its sum of 2**score."""
    rows, dim, lanes, tx = tile.rows, tile.shape.v_dim, tile.lanes, tile.tx
    rows_per_lane, size = tile.size.rows_per_lane, tile.size.keys
    scores = shared(rows * size)
    largest, weight_sum, rescale = shared(rows), shared(rows), shared(rows)
    columns = -(-dim // lanes)
    sums = local(rows_per_lane * columns)
    lane, row = keep(tx % lanes), keep(tx // lanes * rows_per_lane)

    def clear(r: Expr) -> None:
        put(largest, r, LOWEST)
        put(weight_sum, r, 0.0)

    tile.each_row(clear)
    for i in range(rows_per_lane * columns):
        put(sums, i, 0.0)
    blocks = keep(I.if_then_else(tile.exists, ceildiv(I.max(keys.end - keys.begin, 0), size), 0))
    with I.serial(0, blocks) as block:
        token0 = keep(keys.begin + block * size)
        barrier()
        _tile_scores(tile, keys, tensors, scores, token0, lane, row)
        barrier()
        _tile_weights(tile, scores, largest, weight_sum, rescale)
        barrier()
        for i in range(rows_per_lane):
            factor = keep(rescale[row + i])
            for c in range(columns):
                put(sums, i * columns + c, sums[i * columns + c] * factor)
        with I.serial(0, I.min(keys.end - token0, size)) as t:
            v = keys.v(token0 + t)
            weights = [keep(scores[(row + i) * size + t]) for i in range(rows_per_lane)]
            for c in range(columns):
                d = lane + c * lanes if dim % lanes == 0 else I.min(lane + c * lanes, dim - 1)
                value = keep(v.at(d))
                for i in range(rows_per_lane):
                    add(sums, i * columns + c, weights[i] * value)
    barrier()
    for i in range(rows_per_lane):
        with I.If(tile.inside(row + i)), I.Then():
            target, head = keep(tile.first + tile.query(row + i)), keep(tile.head(row + i))
            weight = with_sink(weight_sum[row + i], largest[row + i], tensors.sinks, head)
            total = keep(I.max(weight, I.float32(1e-37)))
            for c in range(columns):
                d = lane + c * lanes
                if dim % lanes == 0:
                    put(tensors.out, (target, head, d), sums[i * columns + c] / total)
                else:
                    with I.If(d < dim), I.Then():
                        put(tensors.out, (target, head, d), sums[i * columns + c] / total)
            if tensors.lse is None:
                continue
            with I.If(lane == 0), I.Then():
                store_sum(tile.shape, tensors.out, tensors.lse, target, head, largest[row + i] + I.log2(total))


def _tile_scores(
    tile: Tile, keys: Keys, tensors: Operands, scores: Buffer, token0: Expr, lane: Expr, row: Expr
) -> None:
    """scores[row, key] of a block of keys; LOWEST where a row does not see a key."""
    lanes, rows_per_lane, size = tile.lanes, tile.size.rows_per_lane, tile.size.keys
    count = size // lanes
    dots = local(rows_per_lane * count)
    tokens = [keep(token0 + lane + lanes * j) for j in range(count)]
    rows = [keys.k(I.min(token, keys.end - 1)) for token in tokens]
    queries = [
        (keep(tile.first + I.max(I.min(tile.query(row + i), tile.queries - 1), 0)), keep(tile.head(row + i)))
        for i in range(rows_per_lane)
    ]
    for i in range(rows_per_lane * count):
        put(dots, i, 0.0)

    def multiply(d: Expr, b: list[Expr]) -> None:
        a = [keep(f32(tensors.q[query, head, d])) for query, head in queries]
        for i in range(rows_per_lane):
            for j in range(count):
                add(dots, i * count + j, a[i] * b[j])

    for_dims(rows, multiply)
    for i in range(rows_per_lane):
        for j in range(count):
            seen = I.And(tokens[j] < keys.end, keys.seen(tile.query(row + i), tokens[j]))
            score = I.if_then_else(seen, score_of(tile.shape, dots[i * count + j], tensors.scale), I.float32(LOWEST))
            put(scores, (row + i) * size + lane + lanes * j, score)


def _tile_weights(tile: Tile, scores: Buffer, largest: Buffer, weight_sum: Buffer, rescale: Buffer) -> None:
    """Scores become weights relative to the new largest score of each row; `rescale` is for earlier sums."""
    size, row_largest, total = tile.size.keys, local(1), local(1)

    def weigh(r: Expr) -> None:
        put(row_largest, 0, largest[r])
        with I.serial(0, size) as t:
            put(row_largest, 0, I.max(row_largest[0], scores[r * size + t]))
        put(total, 0, 0.0)
        with I.serial(0, size) as t:
            score = keep(scores[r * size + t])
            weight = keep(I.if_then_else(score <= I.float32(LOWEST), I.float32(0), I.exp2(score - row_largest[0])))
            put(scores, r * size + t, weight)
            add(total, 0, weight)
        factor = keep(I.exp2(largest[r] - row_largest[0]))
        put(rescale, r, factor)
        put(weight_sum, r, weight_sum[r] * factor + total[0])
        put(largest, r, row_largest[0])

    tile.each_row(weigh)
