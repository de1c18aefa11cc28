"""GEMM of many rows of x with the packed weights of their experts, on matrix units.

Rows are sorted by expert (Gale et al. 2022, "MegaBlocks"). A subgroup for each expert counts the expert's rows and then
places them: without atomics, so the order is the same each time. A workgroup has a tile of rows of one expert, which
it finds from the counts. The grid has as many workgroups as there can be tiles; those without a tile do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import ceildiv, keep, launch, local, pin, workspace
from tir_schedules.gpu.matmul.mma import SUBGROUP_LANES, Rows, Shape
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import Packed
from tir_schedules.rule import Knobs

_TILES = 2  # of 16 rows: in a chunk of 512 tokens with 8 of 128 experts each, an expert has 32 rows


@dataclass(frozen=True)
class Routing:
    """`ids` i32[tokens, per_token]: the experts of each token. `shared_x`: they have one row of x in common."""

    ids: Buffer
    tokens: Expr
    per_token: int
    shared_x: bool

    @property
    def rows(self) -> Expr:
        """Rows of y."""
        return self.tokens * self.per_token

    @property
    def y_rows_per_x_row(self) -> int:
        return self.per_token if self.shared_x else 1

    @property
    def x_rows(self) -> Expr:
        return self.tokens if self.shared_x else self.rows


def gemm(
    weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Output, routing: Routing, knobs: Knobs
) -> None:
    """y [rows, n] of x [x_rows, k]; `flat` is x."""
    count, experts, shape = routing.rows, weight.experts, Shape(weight, False, int(knobs["mma_subgroups"]), _TILES)
    chosen = I.decl_buffer((count,), "int32", data=routing.ids.data)
    counts, order = workspace((experts,), "int32"), workspace((count,), "int32")
    _sort(chosen, counts, order, count, experts)
    with launch(shape.threads, ceildiv(count, shape.rows) + experts, shape.groups) as (bx, by, _):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        expert, first, end = map(keep, _tile(counts, experts, bx, shape.rows))
        words = I.decl_buffer((routing.x_rows * (weight.k // 2),), "uint32", data=flat.data)
        with I.If(first < end), I.Then():
            rows = Rows(first, end - 1, order, routing.y_rows_per_x_row)
            shape.multiply(arrays, words, output, by, rows, expert)


def _sort(ids: Buffer, counts: Buffer, order: Buffer, count: Expr, experts: int) -> None:
    """counts[e] = rows of expert e; order = the rows of expert 0, then of expert 1, ..., each in ascending order."""
    total = I.cast(count, "int32")
    with launch(SUBGROUP_LANES, experts) as (expert, _, lane):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        lane_count = local(1, "int32")
        put(lane_count, 0, 0)
        with I.serial(0, ceildiv(total, SUBGROUP_LANES)) as i:
            add(lane_count, 0, _is_of(ids, i * SUBGROUP_LANES + lane, total, expert, experts))
        rows = pin(device_calls.subgroup_add(lane_count[0]))
        with I.If(lane == 0), I.Then():
            put(counts, expert, rows)
    with launch(SUBGROUP_LANES, experts) as (expert, _, lane):
        I.evaluate(device_calls.require_size(SUBGROUP_LANES))
        before, start = local(1, "int32"), local(1, "int32")
        put(before, 0, 0)
        with I.serial(0, ceildiv(expert, SUBGROUP_LANES)) as i, I.If(i * SUBGROUP_LANES + lane < expert), I.Then():
            add(before, 0, counts[i * SUBGROUP_LANES + lane])
        put(start, 0, device_calls.subgroup_add(before[0]))
        with I.serial(0, ceildiv(total, SUBGROUP_LANES)) as i:
            row = keep(i * SUBGROUP_LANES + lane)
            taken = pin(_is_of(ids, row, total, expert, experts))
            offset = pin(device_calls.subgroup_exclusive_add(taken))
            with I.If(taken != 0), I.Then():
                put(order, start[0] + offset, row)
            add(start, 0, device_calls.subgroup_add(taken))


def _is_of(ids: Buffer, row: Expr, total: Expr, expert: Expr, experts: int) -> Expr:
    """1 if a row belongs to an expert, else 0. Ids out of range are clamped."""
    row_expert = I.min(I.max(ids[I.min(row, total - 1)], 0), experts - 1)
    return I.Select(I.And(row < total, row_expert == expert), I.int32(1), I.int32(0))


def _tile(counts: Buffer, experts: int, tile: Expr, rows: int) -> tuple[Expr, Expr, Expr]:
    """Expert of a tile, its first row in `order` and the end of the expert's rows; no rows if there is no tile."""
    expert, first, end = (local(1, "int32") for _ in range(3))
    tiles, begin = local(1, "int32"), local(1, "int32")
    for buffer in (expert, first, end, tiles, begin):
        put(buffer, 0, 0)
    lane = keep(device_calls.lane())
    for base in range(0, experts, SUBGROUP_LANES):
        number = keep(I.min(base + lane, experts - 1))
        own_rows = pin(I.Select(base + lane < experts, counts[number], I.int32(0)))
        own_tiles = pin((own_rows + (rows - 1)) // rows)
        tile_end = pin(tiles[0] + device_calls.subgroup_inclusive_add(own_tiles))
        row_end = pin(begin[0] + device_calls.subgroup_inclusive_add(own_rows))
        hit = I.And(tile >= tile_end - own_tiles, tile < tile_end)
        start = row_end - own_rows + (tile - (tile_end - own_tiles)) * rows
        for buffer, value in ((expert, number), (first, start), (end, row_end)):
            put(buffer, 0, buffer[0] + device_calls.subgroup_add(pin(I.Select(hit, value, I.int32(0)))))
        put(tiles, 0, device_calls.subgroup_broadcast(tile_end, I.int32(SUBGROUP_LANES - 1)))
        put(begin, 0, device_calls.subgroup_broadcast(row_end, I.int32(SUBGROUP_LANES - 1)))
    return expert[0], first[0], end[0]
