"""Products of many rows of x with the weights of their experts, on matrix units.

Rows are put in the order of their experts (Gale et al. 2022, "MegaBlocks"), each expert by a subgroup that counts its
own and then places them: no atomics, the same order each time. A workgroup has a tile of rows of one expert, which it
finds among the counts; there are as many workgroups as there can be tiles, those that are left over do nothing.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import Buffer, Expr, add, ceildiv, keep, launch, local, pin, put, workspace
from tir_schedules.gpu.matmul import Packed
from tir_schedules.gpu.mma_matmul import Rows, Shape
from tir_schedules.gpu.octets import Knobs

_SIZE = 32
_TILES = 2  # of 16 rows: of a chunk of 512 tokens 128 experts have 32 rows each, where a token has 8


def gemm(
    weight: Packed, arrays: tuple[Buffer, ...], flat: Buffer, output: Buffer, ids: Buffer, m: Expr, top: int,
    common: bool, knobs: Knobs,
) -> None:  # fmt: skip
    """y [m * top, n] of x [m, k] (`common`) or [m * top, k], ids i32[m, top]."""
    count, experts, shape = m * top, weight.experts, Shape(weight, int(knobs["mma_subgroups"]), _TILES)
    chosen = I.decl_buffer((count,), "int32", data=ids.data)
    counts, order = workspace((experts,), "int32"), workspace((count,), "int32")
    _sort(chosen, counts, order, count, experts)
    with launch(shape.threads, ceildiv(count, shape.rows) + experts, shape.groups) as (bx, by, _):
        I.evaluate(device_calls.require_size(_SIZE))
        expert, first, end = map(keep, _tile(counts, experts, bx, shape.rows))
        words = I.decl_buffer(((m if common else count) * (weight.k // 2),), "uint32", data=flat.data)
        with I.If(first < end), I.Then():
            shape.multiply(arrays, words, output, by, Rows(first, end - 1, order, top if common else 1), expert)


def _sort(ids: Buffer, counts: Buffer, order: Buffer, count: Expr, experts: int) -> None:
    """counts[e]: rows of expert e; order: the rows of expert 0, then those of 1, ..., each in their order."""
    total = I.cast(count, "int32")
    with launch(_SIZE, experts) as (expert, _, lane):
        I.evaluate(device_calls.require_size(_SIZE))
        mine = local(1, "int32")
        put(mine, 0, 0)
        with I.serial(0, ceildiv(total, _SIZE)) as i:
            add(mine, 0, _is_of(ids, i * _SIZE + lane, total, expert, experts))
        whole = pin(device_calls.subgroup_add(mine[0]))
        with I.If(lane == 0), I.Then():
            put(counts, expert, whole)
    with launch(_SIZE, experts) as (expert, _, lane):
        I.evaluate(device_calls.require_size(_SIZE))
        before, at = local(1, "int32"), local(1, "int32")
        put(before, 0, 0)
        with I.serial(0, ceildiv(expert, _SIZE)) as i, I.If(i * _SIZE + lane < expert), I.Then():
            add(before, 0, counts[i * _SIZE + lane])
        put(at, 0, device_calls.subgroup_add(before[0]))
        with I.serial(0, ceildiv(total, _SIZE)) as i:
            row = keep(i * _SIZE + lane)
            taken = pin(_is_of(ids, row, total, expert, experts))
            place = pin(device_calls.subgroup_exclusive_add(taken))
            with I.If(taken != 0), I.Then():
                put(order, at[0] + place, row)
            add(at, 0, device_calls.subgroup_add(taken))


def _is_of(ids: Buffer, row: Expr, total: Expr, expert: Expr, experts: int) -> Expr:
    """1 where a row is of an expert, else 0; a number that no expert has is the nearest's."""
    found = I.min(I.max(ids[I.min(row, total - 1)], 0), experts - 1)
    return I.Select(I.And(row < total, found == expert), I.int32(1), I.int32(0))


def _tile(counts: Buffer, experts: int, tile: Expr, rows: int) -> tuple[Expr, Expr, Expr]:
    """Of a tile: its expert, and its first row and the end of the expert's in `order`; no rows where there is none."""
    expert, first, end = (local(1, "int32") for _ in range(3))
    tiles, begin = local(1, "int32"), local(1, "int32")
    for buffer in (expert, first, end, tiles, begin):
        put(buffer, 0, 0)
    lane = keep(device_calls.lane())
    for turn in range(-(-experts // _SIZE)):
        number = keep(I.min(turn * _SIZE + lane, experts - 1))
        mine = pin(I.Select(turn * _SIZE + lane < experts, counts[number], I.int32(0)))
        own = pin((mine + (rows - 1)) // rows)
        tile_end = pin(tiles[0] + device_calls.subgroup_inclusive_add(own))
        row_end = pin(begin[0] + device_calls.subgroup_inclusive_add(mine))
        hit = I.And(tile >= tile_end - own, tile < tile_end)
        start = row_end - mine + (tile - (tile_end - own)) * rows
        for buffer, value in ((expert, number), (first, start), (end, row_end)):
            put(buffer, 0, buffer[0] + device_calls.subgroup_add(pin(I.Select(hit, value, I.int32(0)))))
        put(tiles, 0, device_calls.subgroup_broadcast(tile_end, I.int32(_SIZE - 1)))
        put(begin, 0, device_calls.subgroup_broadcast(row_end, I.int32(_SIZE - 1)))
    return expert[0], first[0], end[0]
