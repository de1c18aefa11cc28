"""y = x W^T for CPUs in float32, W packed as `rows16`: 16 rows of W are the 16 lanes of a vector.

Decode rows have the sums of one row, see `few_rows.py`: with one row the kernel is a GEMV that streams the packed
weights once and keeps dequantization in registers. Prefill rows are a GEMM that dequantizes a K-chunk
of 16*blocks rows into a scratch that stays in L1, then runs a register tile of `rows` x 16*blocks over it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.adapter_shape import adapters_of
from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.cpu.adapters import Adapters, adapter_arguments, emit_adapters
from tir_schedules.cpu.block_weight import Blocks
from tir_schedules.cpu.few_rows import few_rows
from tir_schedules.cpu.gate import apply_gate, gate_of, ungated
from tir_schedules.cpu.packed_weight import LANES, Plain, Quantized, packed_of
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, read, splat, store
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, hand_written

ONE_TILE = 4  # rows of a prompt that no scratch pays for


@dataclass(frozen=True)
class Tile:
    """Register tile of the GEMM: `rows` of x by `blocks` vectors of 16 columns; `depth` of K held in scratch."""

    rows: int = 12
    blocks: int = 2
    depth: int = 256


def matmul(op: Op, tile: Tile) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `matmul`, `gated_matmul` or `adapted_matmul`: x f32[m, K], packed W, y f32[m, N] or
    [m, N / 2], m >= 1; the arguments of its adapters are before y.
    """
    if op.str("layout") != "rows16":
        return Declined(f"weight layout {op.str('layout')} has no CPU kernel")
    if tile.rows % 4:
        # The last panel is covered by tiles of 4 rows, which would read past it.
        return Declined(f"a register tile of {tile.rows} rows is not a multiple of 4")
    w, gate, shape = packed_of(op), gate_of(op), adapters_of(op)
    more = {} if shape is None else adapter_arguments(shape)
    m = tirx.Var("m", "int64")
    x, y = Tensor((m, w.k), "float32"), Tensor((m, w.n if gate is None else gate.width), "float32")

    def finish(X: Buffer, low_rank: tuple[Any, ...], sums: Buffer, Y: Buffer, count: Expr) -> None:
        if shape is not None:
            emit_adapters(Adapters(shape, *low_rank), X, sums, count)
        apply_gate(gate, sums, Y, count)

    def body(X: Buffer, W: Buffer, *rest: Any) -> None:
        arrays, Y = len(w.arrays()) - 1, rest[-1]
        S = rest[:arrays]
        weight = Blocks(w, W, *S) if w.blocked else Quantized(w, W, *S) if S else Plain(w, W)
        sums = ungated(gate, Y, m)
        if op.many_rows:
            _many_rows(X, weight, sums, m, tile)
            return apply_gate(gate, sums, Y, m)
        with I.If(m == I.int64(1)):
            with I.Then():
                weight.gemv(X, sums)
                finish(X, rest[arrays:-1], sums, Y, 1)
            with I.Else():
                if isinstance(weight, Blocks):
                    weight.few_rows(X, sums, m)
                else:
                    few_rows(X, weight, sums, m, tile.rows, tile.blocks)
                finish(X, rest[arrays:-1], sums, Y, m)

    return function("kernel", {"x": x, **w.arrays(), **more, "y": y}, body)


def _many_rows(X: Buffer, weight: Plain | Quantized | Blocks, Y: Buffer, m: Expr, tile: Tile) -> None:
    """Y = X W^T: sums of `depth` of K each, added one after the other, for any number of rows."""
    depth = weight.depth(tile.depth)
    if weight.ragged:
        return _gemm(X, weight, Y, m, tile, depth)
    with I.If(m <= I.int64(ONE_TILE)):
        with I.Then():
            _one_tile(X, weight, Y, m, depth)
        with I.Else():
            _gemm(X, weight, Y, m, tile, depth)


def _one_tile(X: Buffer, weight: Plain | Quantized | Blocks, Y: Buffer, m: Expr, depth: int) -> None:
    """Up to ONE_TILE rows: columns are dequantized to registers, and no other tile needs them."""
    with I.parallel(weight.w.blocks) as block:
        total, column = Registers(ONE_TILE, LANES), Registers(1, LANES)
        with I.serial(-(-weight.w.k // depth)) as chunk:

            def multiply(k: Expr, values: Expr, first: Expr = chunk * depth) -> None:
                column[0] = values
                with I.unroll(ONE_TILE) as r:
                    total[r] = total[r] + splat(X[I.min(r, m - 1), first + k], LANES) * column[0]

            with I.unroll(ONE_TILE) as r:
                total[r] = splat(0.0, LANES)
            weight.columns(block, chunk, depth, multiply)
            Output(Y, 0, m, block, ONE_TILE, 1, chunk > 0).store(total)


def _gemm(X: Buffer, weight: Plain | Quantized | Blocks, Y: Buffer, m: Expr, tile: Tile, depth: int) -> None:
    """A thread dequantizes `depth` of K of its columns, then multiplies all rows with them."""
    w = weight.w
    panels = I.alloc_buffer(((m + tile.rows - 1) // tile.rows, w.k, tile.rows), "float32")
    _pack_rows(X, panels, m)
    with I.parallel(-(-w.blocks // tile.blocks)) as t:
        B = I.alloc_buffer((depth, tile.blocks * LANES), "float32")
        with I.serial(-(-w.k // depth)) as chunk:
            with I.serial(tile.blocks) as b:

                def keep(k: Expr, values: Expr, b: Expr = b) -> None:
                    store(B, (k, b * LANES), values, LANES)

                weight.columns(I.min(t * tile.blocks + b, w.blocks - 1), chunk, depth, keep)
            # Whole panels with the full tile, the last one with tiles of 4 rows.
            with I.serial(m // tile.rows) as panel:
                row, end = panel * tile.rows, (panel + 1) * tile.rows
                out = Output(Y, row, end, t * tile.blocks, tile.rows, tile.blocks, chunk > 0)
                _register_tile(panels, B, panel, 0, chunk * depth, out)
            with I.serial((m % tile.rows + 3) // 4) as i:
                out = Output(Y, m // tile.rows * tile.rows + i * 4, m, t * tile.blocks, 4, tile.blocks, chunk > 0)
                _register_tile(panels, B, m // tile.rows, i * 4, chunk * depth, out)


def _pack_rows(X: Buffer, panels: Buffer, m: Expr) -> None:
    """panels[p, k, r] = X[p * rows + r, k]: what a register tile broadcasts lies in a row (no L1 aliasing)."""
    count, k_size, rows = panels.shape
    with I.parallel(count) as panel, I.serial(rows) as r, I.If(panel * rows + r < m):
        with I.Then(), I.serial(k_size) as k:
            put(panels, (panel, k, r), X[panel * rows + r, k])
        with I.Else(), I.serial(k_size) as k:
            put(panels, (panel, k, r), I.float32(0))


def _register_tile(panels: Buffer, B: Buffer, panel: Expr, first_row: Expr, first: Expr, out: Output) -> None:
    """Emit y (+)= the products of rows of a panel, K from `first` on, with the columns in B."""
    rows, blocks = out.rows, out.blocks
    total, b_vector = Registers(rows * blocks, LANES), Registers(blocks, LANES)
    with I.unroll(rows * blocks) as i:
        total[i] = splat(0.0, LANES)
    with I.serial(I.min(B.shape[0], panels.shape[1] - first)) as k:
        with I.unroll(blocks) as b:
            b_vector[b] = read(B, (k, b * LANES), LANES)
        with I.unroll(rows) as r, I.unroll(blocks) as b:
            x = splat(panels[panel, first + k, first_row + r], LANES)
            total[r * blocks + b] = total[r * blocks + b] + x * b_vector[b]
    out.store(total)


def _rule(func: tirx.PrimFunc, op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    return matmul(op, Tile(*(int(knobs[f"gemm_{name}"]) for name in ("rows", "blocks", "depth"))))


RULES = (NamedRule("cpu.matmul", ("matmul", "gated_matmul", "adapted_matmul"), hand_written(_rule)),)
