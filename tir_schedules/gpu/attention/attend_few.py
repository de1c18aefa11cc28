"""Rows with decode's numerics over pages that the runtime owns: one query each, several of a sequence as well.

A row's keys are split by its own position alone, and parts are merged in order: so its bits do not depend on what runs
beside it, and a row of several of one sequence equals the decode step at its position.

The host knows neither the lengths nor which rows are of one sequence. It launches as many parts as the most that a row
may have; where the step's integers have fewer page ids than those parts need, as few as these ids can fill. For a
given size of `step` the launch is the same at any length, as recorded graphs need.

The workspace for results of parts holds `MAX_ROW_PARTS` of each head: more rows are computed in turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, function, put
from tir_schedules.gpu.attention.decode import PartResults, merge_parts, store_mean, subgroups_of
from tir_schedules.gpu.attention.decode_part import SHARED_BYTES, DecodePart, DecodeTile
from tir_schedules.gpu.attention.key_part import heads_per_workgroup
from tir_schedules.gpu.attention.key_split import KeySplit
from tir_schedules.gpu.attention.pages import (
    MAX_ROW_PARTS,
    AttentionShape,
    Pages,
    byte_pages_argument,
    heads_argument,
    qkv_argument,
    rows_argument,
    sinks_argument,
)
from tir_schedules.gpu.attention.step_keys import RowKeys
from tir_schedules.gpu.kernel import LOWEST, barrier, ceildiv, keep, launch, shared
from tir_schedules.paged import PAGE
from tir_schedules.step import Step, step_argument

_PARTS = 32  # at most, of a row's keys, where the tile does not say how many workgroups fill the GPU


def attend_few(shape: AttentionShape, scale: float, window: int, tile: DecodeTile = DecodeTile()) -> tirx.PrimFunc:
    """qkv [n, row_heads, D], step i32[k], pages -> out [n, heads, v_dim]: row i sees keys up to its position.

    K and V of all rows are in pages already. `window`: how many keys a row sees, its own included; 0: all. Results of
    parts go to `values` and `sums`, f32 vectors of the sizes `shape.workspace`. With `picked_rows`, `rows` i32[n] after
    the pages says which rows of the step these are. Heads with sinks have their logits in an argument before `out`,
    f32[heads].
    """
    n, k = tirx.Var("n", "int64"), tirx.Var("k", "int64")
    arguments: dict[str, Argument] = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(k, shape.page_group),
        "pages": byte_pages_argument(shape),
        **rows_argument(shape, n),
        **sinks_argument(shape),
        "out": heads_argument(shape, n),
        **{name: Tensor((size,), "float32") for name, size in zip(("values", "sums"), shape.workspace)},
    }
    while tile.shared_bytes(shape.group) > SHARED_BYTES:
        tile = replace(tile, part=tile.part // 2)
        if not tile.part:
            raise ValueError(f"{shape.group} query heads of a KV head: their weights do not fit shared memory")
    split = _split(shape, window, tile)

    def body(qkv: Buffer, step: Step, pages: Pages, *rest: Buffer) -> None:
        *sinks, out, values, sums = rest
        step = replace(step, rows=sinks.pop(0)) if shape.picked_rows else step
        rows, at_once = RowKeys(step, pages), MAX_ROW_PARTS // split.most
        threads, groups = tile.threads, shape.num_kv_heads
        if shape.subgroup:
            threads, groups = split.subgroups * shape.subgroup, groups * (shape.group // heads_per_workgroup(shape))
        with I.serial(0, I.cast(ceildiv(n, at_once), "int32")) as turn:
            first = keep(turn * at_once)
            count = keep(I.min(I.cast(n, "int32") - first, at_once))
            with launch(threads, count * groups, I.min(split.most, ceildiv(k * PAGE, split.granule))) as (bx, by, tx):
                index, stores = keep(first * groups + bx), PartResults(shape, count, by, values, sums, first)
                if shape.subgroup:
                    split.run(
                        rows,
                        index,
                        by,
                        lambda part: part.run(qkv, I.float32(scale), stores.store_values, stores.store_sums),
                    )
                else:
                    _run_plain(split, tile, rows, qkv, scale, stores, index, by, tx)
            if (
                shape.subgroup and tile.blocks
            ):  # many parts, on a GPU that wants them; software adapters pay for barriers
                split.merge(rows, first, count, values, sums, sinks, store_mean(out))
            else:
                merge_parts(shape, count, lambda row: split.bounds(rows, row)[2], values, sums, out, None, first, sinks)

    return function("attend_few", arguments, body)


def _split(shape: AttentionShape, window: int, tile: DecodeTile) -> KeySplit:
    subgroups = subgroups_of(shape, tile)
    filling = KeySplit.of(shape, window, tile.blocks, subgroups)
    return filling or KeySplit(shape, window, _PARTS, tile.part, subgroups)


def _run_plain(
    split: KeySplit,
    tile: DecodeTile,
    rows: RowKeys,
    q: Buffer,
    scale: float,
    stores: PartResults,
    index: Expr,
    number: Expr,
    tx: Expr,
) -> None:
    """A part without subgroups, if the row has it: blocks of `tile.part` keys, as many as shared memory holds."""
    first, size, used = split.bounds(rows, keep(index // split.shape.num_kv_heads))
    with I.If(number < used), I.Then():
        begin = keep(first + number * size)
        part = DecodePart(split.shape, tile, rows, split.window, index, begin, tx)
        end = keep(I.min(part.keys, begin + size))
        running = _Running.of(part, stores)
        with I.serial(0, ceildiv(end - begin, tile.part)) as block:
            part.place(begin + block * tile.part)
            running.scale_to(block)
            part.run(q, I.float32(scale), running.store_values, running.store_sums)
            barrier()


@dataclass
class _Running:
    """Results of a part's blocks so far, in the workspace; shared memory has what scales them, for each head."""

    part: DecodePart
    stores: PartResults
    largest: Buffer
    total: Buffer
    shares: Buffer
    later: Expr = False

    @staticmethod
    def of(part: DecodePart, stores: PartResults) -> _Running:
        group = part.shape.group
        return _Running(part, stores, shared(group), shared(group), shared(2 * group))

    def scale_to(self, block: Expr) -> None:
        """Results are now those of a block; the first one finds none before."""
        self.later = keep(block > 0)

    def store_sums(self, row: Expr, head: Expr, largest: Expr, total: Expr) -> None:
        g = keep(head - self.part.h * self.part.shape.group)
        before = keep(I.if_then_else(self.later, self.largest[g], I.float32(LOWEST)))
        top = keep(I.max(before, largest))
        put(self.shares, 2 * g, I.exp2(before - top))
        put(self.shares, 2 * g + 1, I.exp2(largest - top))
        sum_ = I.if_then_else(self.later, self.total[g] * self.shares[2 * g], I.float32(0))
        put(self.total, g, sum_ + total * self.shares[2 * g + 1])
        put(self.largest, g, top)
        self.stores.store_sums(row, head, top, self.total[g])

    def store_values(self, row: Expr, head: Expr, d: Expr, sum_: Expr, total: Expr) -> None:
        g = head - self.part.h * self.part.shape.group
        values, at = self.stores.values, keep(self.stores.value_at(row, head, d))
        before = I.if_then_else(self.later, values[at] * self.shares[2 * g], I.float32(0))
        put(values, at, before + sum_ * self.shares[2 * g + 1])
