"""Many rows times a packed weight with Intel's tile registers (AMX): 32 rows by 32 columns of y at a time.

4-bit codes become signed bytes on one scale for 128 of a row, as in `int8_gemm.py`: once for all rows, in scratch.
8-bit codes are a tile's second factor as `rows16` has them, 16 columns of four bytes side by side, and go from the
weight to tiles without a change, with a scale for every 32 or for the whole row. Activations are int8 on one scale
for the same span of K.

The sums of a span go through memory, where scaled float32 sums are made of them: tiles have no float arithmetic for
int32. That work belongs to the span before while the tiles work on the next one. A span of 128 keeps the tile unit
busy for 8 products of 16 cycles; it takes 64 cycles of stores of tiles, 64 of stores of sums, and 96 cycles of vector
arithmetic in two ports. By these throughputs of Sapphire Rapids 80 % of the peak are possible where all of it
overlaps (the last span of DEPTH does not) and 45 % where nothing does; half tiles for spans of 32 reach 25 %. An
estimate: these kernels ran on an emulator (`tests/kernels/amx_emulator.c`), never yet on a CPU with AMX.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T
from tvm.script.ir_builder import tirx as I

from tir_schedules.cpu import amx
from tir_schedules.cpu.amx import ROWS
from tir_schedules.cpu.int8_activations import IN_ORDER, PAIRS, Groups, quantize_group
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_gemm import CHUNK, gemm_fits, requantize
from tir_schedules.cpu.matmul import Packed
from tir_schedules.cpu.vectors import Buffer, Expr, put, read, scratch, splat, value

# Rows of x from which on tiles pay: unpacking 16 columns of 128 costs about what integer dot products of 8 rows do.
AMX_ROWS = 16
# Spans between two visits of y. 128 x 4 of K are 16 KiB of bytes and as many of x that passes by: both stay in L1.
DEPTH = 4
SUMS, FIRST, SECOND = 0, 4, 6  # tiles: 2 x 2 sums, two of x, two of w
COLUMNS = 2 * ROWS


@dataclass(frozen=True)
class Spans:
    """How a weight [N, K] and x are multiplied: `groups` of x have one scale, and products of them one tile of sums."""

    groups: Groups
    packed: bool  # 8-bit codes, straight from the weight

    @property
    def width(self) -> int:
        """Bytes of K in a row of a tile."""
        return 4 * self.groups.side

    @property
    def steps(self) -> int:
        """Tiles of a span."""
        return self.groups.size // self.width


def spans_of(w: Packed, dot: Dot) -> Spans | None:
    """The spans of a weight that tiles can multiply, where the CPU has them; None: nothing of the sort."""
    if dot.kind != "amx_int8":
        return None
    if w.bits == 8:
        size = CHUNK if w.groups == 1 and w.k % CHUNK == 0 else 32
        return Spans(Groups(w.k, size, IN_ORDER, w.zero_point, min(size, 64) // 4), packed=True)
    return Spans(Groups(w.k, CHUNK, PAIRS, dot.byte_offset, 16), packed=False) if gemm_fits(w, dot) else None


def _shapes(spans: Spans) -> list[tuple[int, int]]:
    """Rows and bytes of a row of each tile."""
    return [(ROWS, 64)] * 4 + [(ROWS, spans.width)] * 2 + [(spans.width // 4, 64)] * 2


@dataclass(frozen=True)
class _Weight:
    """Where tiles of two blocks of 16 columns from `block` on lie: in the packed weight, or in scratch as bytes."""

    spans: Spans
    memory: Buffer
    block: Expr
    last_block: int

    def load(self, tile: int, b: int, first: Expr, slot: Expr, step: int) -> None:
        """The step-th tile of span `first + slot`, the slot-th in scratch."""
        if self.spans.packed:
            row = ((first + slot) * self.spans.steps + step) * self.spans.groups.side
            amx.load(tile, self.memory[I.min(self.block + b, self.last_block), row, 0], 64)
        else:
            amx.load(tile, self.memory[(slot * self.spans.steps + step) * 16, b, 0], 128)


def _tile(
    panels: tuple[Buffer, Buffer, Buffer],
    weight: _Weight,
    steps: Buffer,
    sums: Buffer,
    total: Buffer,
    Y: Buffer,
    panel: Expr,
    m: Expr,
    first: Expr,
    count: Expr,
    height: int,
    n: int,
) -> None:
    """Emit Y[16 * panel :, 32 columns] (+)= the products of `height` panels with `count` spans from `first` on."""
    Q, groups = panels[0], weight.spans.groups

    def multiply(slot: Expr) -> None:
        for i in range(2 * height):
            amx.zero(SUMS + i)
        for step in range(weight.spans.steps):
            column = (first + slot) * weight.spans.steps + step
            for b in range(2):
                weight.load(SECOND + b, b, first, slot, step)
            for i in range(height):
                amx.load(FIRST + i, Q[panel + i, column, 0], 4 * groups.side)
                for b in range(2):
                    amx.multiply("su" if weight.spans.packed else "ss", SUMS + 2 * i + b, FIRST + i, SECOND + b)

    def store() -> None:
        for i in range(height):
            for b in range(2):
                amx.store(SUMS + 2 * i + b, sums[i * ROWS * COLUMNS + b * ROWS], 4 * COLUMNS)

    def scaled(r: Expr, slot: Expr) -> list[Expr]:
        """A row of the sums of spans up to `slot`, whose integers are in `sums`."""
        at = (panel + r // ROWS, first + slot, r % ROWS)
        scale, found = value(splat(panels[1][at], 16)), []
        for b in range(2):
            integers = read(sums, r * COLUMNS + b * ROWS, 16)
            if groups.zero_point:
                integers = integers + splat(panels[2][at], 16)
            before = I.Select(slot > 0, read(total, r * COLUMNS + b * ROWS, 16), splat(0.0, 16))
            found.append(before + I.cast(integers, "float32x16") * (steps[slot, b, I.ramp(0, 1, 16)] * scale))
        return found

    multiply(0)
    store()
    with I.serial(1, count) as slot:
        multiply(slot)
        with I.serial(0, ROWS * height) as r:
            for b, x in enumerate(scaled(r, slot - 1)):
                I.buffer_store(total, x, [I.ramp(r * COLUMNS + b * ROWS, 1, 16)])
        store()
    with I.serial(0, I.min(ROWS * height, m - panel * ROWS)) as r:
        for b, x in enumerate(scaled(r, count - 1)):
            _add(Y, panel * ROWS + r, weight.block + b, x, first > 0, n)


def _add(Y: Buffer, row: Expr, block: Expr, x: Expr, add: Expr, n: int) -> None:
    """Emit Y[row, 16 * block :] (+)= x, as far as there are columns."""
    kept = scratch(16)
    put(kept, I.ramp(0, 1, 16), x)

    def columns(at: Expr, lanes: Expr) -> None:
        with I.If(add), I.Then():
            put(kept, lanes, kept[lanes] + Y[row, at])
        I.buffer_store(Y, kept[lanes], [row, at])

    with I.If(block < n // 16):
        with I.Then():
            columns(I.ramp(block * 16, 1, 16), I.ramp(0, 1, 16))
        with I.Else(), I.serial(0, 16) as lane, I.If(block * 16 + lane < n), I.Then():
            columns(block * 16 + lane, lane)


@T.macro
def amx_gemm(X, W, S, Y, m, w, dot, spans):
    """y = x W^T: per 32 columns and DEPTH spans, bytes and scales once, then all rows."""
    groups, side, count = T.meta_var((spans.groups, spans.groups.side, spans.groups.count))
    Q = T.alloc_buffer(((m + ROWS - 1) // ROWS, groups.words // side, ROWS * side), "int32")
    scales = T.alloc_buffer(((m + ROWS - 1) // ROWS, groups.count, ROWS), "float32")
    corrections = T.alloc_buffer(((m + ROWS - 1) // ROWS, groups.count, ROWS), "int32")
    panels: T.let[T.int64] = (m + ROWS - 1) // ROWS
    for i in T.parallel(panels * ROWS):
        for g in T.serial(count):
            row = T.meta_var(T.min(i, m - 1))  # the last one fills the last panel
            quantize_group(X, row, g, groups, Q, scales, corrections, i // ROWS, i % ROWS)
    for t in T.parallel(-(-w.blocks // 2)):
        bytes_ = T.alloc_buffer((1 if spans.packed else DEPTH * 32, 2, 16), "uint32")
        steps = T.alloc_buffer((DEPTH, 2, 16), "float32")
        sums = T.alloc_buffer((COLUMNS * COLUMNS,), "int32")
        total = T.alloc_buffer((COLUMNS * COLUMNS,), "float32")
        amx.configure(_shapes(spans))
        for d in T.serial(-(-count // DEPTH)):
            here = T.meta_var(T.min(DEPTH, count - d * DEPTH))
            for slot in T.serial(here):
                for b in T.serial(2):
                    block = T.meta_var(T.min(t * 2 + b, w.blocks - 1))
                    if spans.packed:
                        scale = T.meta_var(S[block, d * DEPTH + slot if w.groups > 1 else 0, T.ramp(0, 1, 16)])
                        steps[slot, b, T.ramp(0, 1, 16)] = T.cast(scale, "float32x16")
                    else:
                        requantize(W, S, bytes_, steps, block, b, d * DEPTH + slot, slot, w, dot)
            weight = T.meta_var(_Weight(spans, W if spans.packed else bytes_, t * 2, w.blocks - 1))
            for p in T.serial(panels // 2):
                _tile((Q, scales, corrections), weight, steps, sums, total, Y, p * 2, m, d * DEPTH, here, 2, w.n)
            for p in T.serial(panels % 2):
                last = T.meta_var(panels - 1 - p)
                _tile((Q, scales, corrections), weight, steps, sums, total, Y, last, m, d * DEPTH, here, 1, w.n)
        amx.release()
