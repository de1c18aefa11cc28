"""GEMV: each lane multiplies one row of a packed weight by one row of x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, local, shared
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed, Rows, sum_in_order
from tir_schedules.rule import Knobs


@dataclass(frozen=True)
class GemvShape:
    """A workgroup has `blocks` of 32 rows; `splits` sets of 32 invocations share the columns."""

    blocks: int
    splits: int

    @property
    def threads(self) -> int:
        return BLOCK_ROWS * self.splits


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
    x: Callable[[Expr], Expr],
    store: Callable[[Expr, Expr], None],
) -> None:
    """store(row, w[row] . x) for the rows of one workgroup.

    Codes of a quantization group are multiplied without subtracting the zero point. Zero point times the sum of x is
    subtracted once for the group, before the scale.
    """
    w, sizes, splits = rows.weight, rows.sizes, shape.splits
    lane, part = (tx, 0) if splits == 1 else (keep(tx % BLOCK_ROWS), keep(tx // BLOCK_ROWS))
    blocks = [bx * shape.blocks + r for r in range(shape.blocks)]
    if w.blocks % shape.blocks:
        blocks = [keep(I.min(block, sizes.blocks - 1)) for block in blocks]
    sums, dots, total = local(shape.blocks), local(shape.blocks), local(1)
    for r in range(shape.blocks):
        put(sums, r, I.float32(0))

    def add_word(at: Expr) -> None:
        xs = _load_x(rows, at, x)
        if w.bits:
            put(total, 0, sum_in_order([total[0], *xs]))
        for r, block in enumerate(blocks):
            put(dots, r, sum_in_order([dots[r], *(b * a for a, b in zip(xs, rows.elements(block, lane, at)))]))

    def add_group(at: Expr) -> None:
        """Add the words that share a scale."""
        put(total, 0, I.float32(0))
        for r in range(shape.blocks):
            put(dots, r, I.float32(0))
        if w.group_words == 1:
            add_word(at)
        else:
            with I.serial(0, w.group_words) as i:
                add_word(keep(at * w.group_words + i))
        for r, block in enumerate(blocks):
            if w.bits:
                scale = rows.scale(block, lane, at * w.group_words)
                add(sums, r, (dots[r] - total[0] * I.float32(w.zero_point)) * scale)
            else:
                add(sums, r, dots[r])

    groups = ceildiv(sizes.k, w.run) // w.group_words
    with I.serial(0, groups // splits) as i:
        add_group(keep(i * splits + part) if splits > 1 else i)
    if w.words // w.group_words % splits:
        with I.If(part < groups % splits), I.Then():
            add_group(keep(groups // splits * splits + part))
    if splits > 1:
        _sum_splits(shape, sums, tx)
    for r in range(shape.blocks):
        _store_sum(rows, shape, tx, (bx * shape.blocks + r) * BLOCK_ROWS + lane, sums[r], store)


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


def _sum_splits(shape: GemvShape, sums: Buffer, tx: Expr) -> None:
    """The first 32 invocations get the sums over all splits."""
    parts = shared(shape.blocks * shape.threads)
    for r in range(shape.blocks):
        put(parts, r * shape.threads + tx, sums[r])
    barrier()
    with I.If(tx < BLOCK_ROWS), I.Then():
        for r in range(shape.blocks):
            for split in range(1, shape.splits):
                add(sums, r, parts[r * shape.threads + split * BLOCK_ROWS + tx])
