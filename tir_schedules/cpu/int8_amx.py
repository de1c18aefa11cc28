"""Prefill rows times a packed weight with Intel's tile registers (AMX): 32 rows by 32 columns of y at a time.

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

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu import amx
from tir_schedules.cpu.amx import ROWS
from tir_schedules.cpu.int8_activations import IN_ORDER, PAIRS, Groups, Panels, alloc_panels, quantize_group
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_gemm import CHUNK, gemm_fits, requantize
from tir_schedules.cpu.int8_unpacked import Unpacked
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.vectors import load, read, scratch, splat, store, value

# Spans between two visits of y. 128 x 4 of K are 16 KiB of bytes and as many of x that passes by: both stay in L1.
DEPTH = 4
SUMS, FIRST, SECOND = 0, 4, 6  # tiles: 2 x 2 sums, two of x, two of w
COLUMNS = 2 * ROWS


@dataclass(frozen=True)
class Spans:
    """How a weight [N, K] and x are multiplied: `groups` of x share one scale, and their products one tile of sums."""

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
    if w.bits == 8 and not w.blocked:
        size = CHUNK if w.groups == 1 and w.k % CHUNK == 0 else 32
        return Spans(Groups(w.k, size, IN_ORDER, w.zero_point, min(size, 64) // 4), packed=True)
    return Spans(Groups(w.k, CHUNK, PAIRS, dot.byte_offset, 16), packed=False) if gemm_fits(w, dot) else None


def _shapes(spans: Spans) -> list[tuple[int, int]]:
    """Rows and bytes of a row of each tile."""
    return [(ROWS, 64)] * 4 + [(ROWS, spans.width)] * 2 + [(spans.width // 4, 64)] * 2


@dataclass(frozen=True)
class _Columns:
    """All rows of x, quantized, and what a thread has for two blocks of 16 columns from `block` on.

    Tiles of the weight are in `unpacked`, or in the packed weight itself. `sums` and `total` are [32, 32].
    """

    spans: Spans
    weight: Weight
    panels: Panels
    m: Expr
    Y: Buffer
    block: Expr
    unpacked: Unpacked
    sums: Buffer
    total: Buffer

    def prepare(self, first: Expr, count: Expr) -> None:
        """Emit scales, and bytes where the weight's are none, of `count` spans from `first` on."""
        packed = self.weight.packed
        with I.serial(count) as slot, I.serial(2) as b:
            block = I.min(self.block + b, packed.blocks - 1)
            if self.spans.packed:
                scale = load(self.weight.scales, (block, first + slot if packed.groups > 1 else 0, 0), 16)
                store(self.unpacked.scales, (slot, b, 0), scale, 16)
            else:
                requantize(self.weight, block, first + slot, self.unpacked, slot, b)

    def multiply(self, panel: Expr, height: int, first: Expr, count: Expr) -> None:
        """Emit Y[16 * panel :, 32 columns] (+)= `height` panels times `count` spans from `first` on."""
        self._multiply_span(panel, height, first, 0)
        self._store_sums(height)
        with I.serial(1, count) as slot:
            self._multiply_span(panel, height, first, slot)
            with I.serial(0, ROWS * height) as r:
                for b, x in enumerate(self._scaled(panel, r, first, slot - 1)):
                    store(self.total, r * COLUMNS + b * ROWS, x, 16)
            self._store_sums(height)
        with I.serial(0, I.min(ROWS * height, self.m - panel * ROWS)) as r:
            for b, x in enumerate(self._scaled(panel, r, first, count - 1)):
                _add(self.Y, panel * ROWS + r, self.block + b, x, first > 0)

    def _multiply_span(self, panel: Expr, height: int, first: Expr, slot: Expr) -> None:
        """Tiles of sums = the products of a span."""
        groups = self.spans.groups
        for i in range(2 * height):
            amx.zero(SUMS + i)
        for step in range(self.spans.steps):
            column = (first + slot) * self.spans.steps + step
            for b in range(2):
                self._load_weight(SECOND + b, b, first, slot, step)
            for i in range(height):
                amx.load(FIRST + i, self.panels.words[panel + i, column, 0], 4 * groups.side)
                for b in range(2):
                    amx.multiply("su" if self.spans.packed else "ss", SUMS + 2 * i + b, FIRST + i, SECOND + b)

    def _load_weight(self, tile: int, b: int, first: Expr, slot: Expr, step: int) -> None:
        """The step-th tile of span `first + slot`, the slot-th in scratch."""
        if self.spans.packed:
            row = ((first + slot) * self.spans.steps + step) * self.spans.groups.side
            block = I.min(self.block + b, self.weight.packed.blocks - 1)
            amx.load(tile, self.weight.words[block, row, 0], 64)
        else:
            amx.load(tile, self.unpacked.words[(slot * self.spans.steps + step) * 16, b, 0], 128)

    def _store_sums(self, height: int) -> None:
        for i in range(height):
            for b in range(2):
                amx.store(SUMS + 2 * i + b, self.sums[i * ROWS * COLUMNS + b * ROWS], 4 * COLUMNS)

    def _scaled(self, panel: Expr, r: Expr, first: Expr, slot: Expr) -> list[Expr]:
        """A row of the sums of spans up to `slot`, whose integers are in `sums`."""
        at = (panel + r // ROWS, first + slot, r % ROWS)
        scale, found = value(splat(self.panels.scales[at], 16)), []
        for b in range(2):
            integers = read(self.sums, r * COLUMNS + b * ROWS, 16)
            if self.spans.groups.zero_point:
                integers = integers + splat(self.panels.corrections[at], 16)
            before = I.Select(slot > 0, read(self.total, r * COLUMNS + b * ROWS, 16), splat(0.0, 16))
            step = read(self.unpacked.scales, (slot, b, 0), 16)
            found.append(before + I.cast(integers, "float32x16") * (step * scale))
        return found


def _add(Y: Buffer, row: Expr, block: Expr, x: Expr, add: Expr) -> None:
    """Emit Y[row, 16 * block :] (+)= x, as far as there are columns."""
    kept, n = scratch(16), int(Y.shape[1])
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


def amx_gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr, spans: Spans) -> None:
    """Emit y = x W^T: per 32 columns and DEPTH spans, bytes and scales once, then all rows."""
    count = spans.groups.count
    panels = alloc_panels(spans.groups, (m + ROWS - 1) // ROWS, ROWS)
    panel_count = I.bind((m + ROWS - 1) // ROWS)
    with I.parallel(panel_count * ROWS) as i, I.serial(count) as g:
        row = I.min(i, m - 1)  # the last one fills the last panel
        quantize_group(X, row, g, panels, i // ROWS, i % ROWS)
    with I.parallel(-(-weight.packed.blocks // 2)) as t:
        words = I.alloc_buffer((1 if spans.packed else DEPTH * 32, 2, 16), "uint32")
        unpacked = Unpacked(words, I.alloc_buffer((DEPTH, 2, 16), "float32"), CHUNK)
        sums, total = scratch(COLUMNS * COLUMNS, "int32"), scratch(COLUMNS * COLUMNS)
        columns = _Columns(spans, weight, panels, m, Y, t * 2, unpacked, sums, total)
        amx.configure(_shapes(spans))
        with I.serial(-(-count // DEPTH)) as d:
            first, here = d * DEPTH, I.min(DEPTH, count - d * DEPTH)
            columns.prepare(first, here)
            with I.serial(panel_count // 2) as p:
                columns.multiply(p * 2, 2, first, here)
            with I.serial(panel_count % 2) as p:
                columns.multiply(panel_count - 1 - p, 1, first, here)
        amx.release()
