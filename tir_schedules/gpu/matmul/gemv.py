"""GEMV: each lane multiplies one row of a packed weight by one row of x, or by a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, local, pin, shared
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed, Rows, sum_in_order
from tir_schedules.rule import Knobs

SUMS = 2  # of an invocation for a row of the weight and a row of x: that of a quantization group, and of all


@dataclass(frozen=True)
class GemvShape:
    """A workgroup has `blocks` of 32 rows; `splits` sets of 32 invocations share the columns."""

    blocks: int
    splits: int

    @property
    def threads(self) -> int:
        return BLOCK_ROWS * self.splits

    def of_rows(self, rows: int, knobs: Knobs) -> GemvShape:
        """For so many rows of x: columns are split in the same way, so that their sums are added in the same order."""
        return self if rows == 1 else replace(self, blocks=min(self.blocks, int(knobs["gemv_sums"]) // (SUMS * rows)))


def gemv_shape(weight: Packed, knobs: Knobs) -> GemvShape:
    """As many splits as keep a GPU busy, while each has enough words to be worth the sum at the end."""
    blocks = min(int(knobs["gemv_blocks"]), weight.blocks)
    max_splits = int(knobs["gemv_invocations"]) * blocks // (weight.blocks * BLOCK_ROWS)
    splits = 1
    while splits < min(8, max_splits) and weight.words // (2 * splits) >= int(knobs["gemv_words"]):
        splits *= 2
    return GemvShape(blocks, splits)


def gemv(
    rows: Rows,
    shape: GemvShape,
    bx: Expr,
    tx: Expr,
    xs: Sequence[Callable[[Expr], Expr]],
    store: Callable[[int, Expr, Expr], None],
) -> None:
    """store(i, row, w[row] . xs[i]) for the rows of one workgroup; `xs[i](column)` is an element of x.

    Codes of a quantization group are multiplied without subtracting the zero point. Zero point times the sum of x is
    subtracted once for the group, before the scale.
    """
    w, sizes, splits = rows.weight, rows.sizes, shape.splits
    lane, part = (tx, 0) if splits == 1 else (keep(tx % BLOCK_ROWS), keep(tx // BLOCK_ROWS))
    blocks = [bx * shape.blocks + r for r in range(shape.blocks)]
    if w.blocks % shape.blocks:
        blocks = [keep(I.min(block, sizes.blocks - 1)) for block in blocks]
    count = len(xs) * shape.blocks
    sums, dots, totals = local(count), local(count), local(len(xs))
    for at in range(count):
        put(sums, at, I.float32(0))

    def add_word(word: Expr) -> None:
        loaded = [_load_x(rows, word, x) for x in xs]
        if w.bits:
            for i, values in enumerate(loaded):
                put(totals, i, sum_in_order([totals[i], *values]))
        for r, block in enumerate(blocks):
            elements = rows.elements(block, lane, word)
            if len(xs) > 1:
                elements = [pin(element) for element in elements]
            for i, values in enumerate(loaded):
                at = i * shape.blocks + r
                put(dots, at, sum_in_order([dots[at], *(b * a for a, b in zip(values, elements))]))

    def add_group(group: Expr) -> None:
        """Add the words that share a scale."""
        for i in range(len(xs)):
            put(totals, i, I.float32(0))
        for at in range(count):
            put(dots, at, I.float32(0))
        if w.group_words == 1:
            add_word(group)
        else:
            with I.serial(0, w.group_words) as i:
                add_word(keep(group * w.group_words + i))
        for r, block in enumerate(blocks):
            scale = rows.scale(block, lane, group * w.group_words) if w.bits else None
            if scale is not None and len(xs) > 1:
                scale = scale.pinned()
            for i in range(len(xs)):
                at = i * shape.blocks + r
                add(sums, at, dots[at] if scale is None else scale.applied(dots[at], totals[i], w.zero_point))

    groups = ceildiv(sizes.k, w.run) // w.group_words
    with I.serial(0, groups // splits) as i:
        add_group(keep(i * splits + part) if splits > 1 else i)
    if w.words // w.group_words % splits:
        with I.If(part < groups % splits), I.Then():
            add_group(keep(groups // splits * splits + part))
    if splits > 1:
        _sum_splits(shape, sums, count, tx)
    for i in range(len(xs)):
        for r in range(shape.blocks):
            row = (bx * shape.blocks + r) * BLOCK_ROWS + lane
            _store_sum(rows, shape, tx, row, sums[i * shape.blocks + r], partial(store, i))


def _load_x(rows: Rows, word: Expr, x: Callable[[Expr], Expr]) -> list[Expr]:
    """The elements of x that one word of the weight multiplies, as float32; 0 beyond its columns."""
    xs = []
    for j in range(rows.weight.run):
        column = word * rows.weight.run + j
        inside = rows.inside(column)
        value = f32(x(column if inside is None else I.min(column, rows.sizes.k - 1)))
        xs.append(keep(value if inside is None else I.Select(inside, value, I.float32(0))))
    return xs


def _store_sum(
    rows: Rows, shape: GemvShape, tx: Expr, row: Expr, total: Expr, store: Callable[[Expr, Expr], None]
) -> None:
    """store(row, total), by one invocation and only for rows of the weight."""
    guards = [tx < BLOCK_ROWS] if shape.splits > 1 else []
    if rows.weight.n % (BLOCK_ROWS * shape.blocks):
        guards.append(row < rows.sizes.n)
    if not guards:
        store(row, total)
        return
    with I.If(guards[0] if len(guards) == 1 else I.And(*guards)), I.Then():
        store(row, total)


def _sum_splits(shape: GemvShape, sums: Buffer, count: int, tx: Expr) -> None:
    """The first 32 invocations get the sums over all splits."""
    parts = shared(count * shape.threads)
    for at in range(count):
        put(parts, at * shape.threads + tx, sums[at])
    barrier()
    with I.If(tx < BLOCK_ROWS), I.Then():
        for at in range(count):
            for split in range(1, shape.splits):
                add(sums, at, parts[at * shape.threads + split * BLOCK_ROWS + tx])
