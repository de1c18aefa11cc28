"""y += B A x for CPUs in float32, where each row may have another adapter, or none.

The numbers of a row depend on the row alone. Four rows with one adapter share reads of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.packed_weight import codes
from tir_schedules.cpu.vectors import Registers, load, read, splat, store, value
from tir_schedules.op import by_hand
from tir_schedules.step import Step
from tir_schedules.step_layout import RANK

DTYPES = ("float32", "float16", "uint8")
_ROWS = 4  # that share what is read of an adapter
_SUMS = 2  # of a row and rank, that are added up at the end: a sum alone waits for the one before


def add_adapters(shape: AdapterShape) -> tirx.PrimFunc:
    """(x f32[m, k], step, a, b, scale, y f32[m, N]), where y is changed in place."""
    arguments, m, _ = shape.arguments()

    def body(X: Buffer, step: Step, A: Buffer, B: Buffer, scale: Buffer, Y: Buffer) -> None:
        emit_adapters(Adapters(shape, step, A, B, scale), X, Y, m)

    return by_hand({"add_adapters": function("add_adapters", arguments, body)}, "", **shape.facts)["add_adapters"]


@dataclass(frozen=True)
class Adapters:
    """The arguments of a kernel for the adapters of its rows, as `AdapterShape.arrays` describes them."""

    shape: AdapterShape
    step: Step
    A: Buffer
    B: Buffer
    scale: Buffer


def adapter_arguments(shape: AdapterShape) -> dict[str, Tensor]:
    """The arguments that `Adapters` holds, in its order."""
    arguments, *_ = shape.arguments()
    return {name: arguments[name] for name in ("step", "a", "b", "scale")}


def emit_adapters(adapters: Adapters, X: Buffer, Y: Buffer, m: Expr) -> None:
    """Emit y += B A x in parallel over rows."""
    kernel = _Kernel(adapters.shape, m, adapters.step, X, adapters.A, adapters.B, adapters.scale, Y)
    if isinstance(m, int):
        with I.serial(m) as row:
            return kernel.row(row)
    with I.If(m == I.int64(1)):
        with I.Then():
            kernel.row(I.int64(0))
        with I.Else(), I.parallel(m) as row:
            kernel.row(row)


@dataclass(frozen=True)
class _Kernel:
    """Emits the kernel over its arguments."""

    shape: AdapterShape
    m: Expr
    step: Step
    X: Buffer
    A: Buffer
    B: Buffer
    scale: Buffer
    Y: Buffer

    def row(self, row: Expr) -> None:
        """Change a row of y; of four rows with one adapter, the first one's task changes all."""
        step, first = self.step, value(row // _ROWS * _ROWS)
        begin, end = value(step.adapter_begin(row)), value(step.adapter_end(row))
        alike = [first + _ROWS <= self.m]
        for i in range(_ROWS):
            other = I.min(first + i, self.m - 1)
            alike += [step.adapter_begin(other) == begin, step.adapter_end(other) == end]
        with I.If(tirx.all(*alike)):
            with I.Then(), I.If(row == first), I.Then():
                self._rows(row, _ROWS, begin, end)
            with I.Else():
                self._rows(row, 1, begin, end)

    def _rows(self, row: Expr, rows: int, begin: Expr, end: Expr) -> None:
        """Add the blocks from `begin` to `end` to neighbouring rows, a part of y after the other."""
        t = Registers(rows, RANK)
        with I.serial(begin, end) as block:
            at = 0
            for part, columns in enumerate(self.shape.parts):
                with I.If(self.scale[block, part, 0] != I.float32(0)), I.Then():
                    self._shrink(row, rows, block, part, t)
                    vectors = next(n for n in (4, 2, 1) if columns // 16 % n == 0)
                    with I.serial(columns // 16 // vectors) as tile:
                        self._expand(row, rows, block, at // 16 + tile * vectors, vectors, t)
                at += columns

    def _shrink(self, row: Expr, rows: int, block: Expr, part: int, t: Registers) -> None:
        """t = scale * A x."""
        total, column = Registers(rows * _SUMS, RANK), Registers(1, RANK)
        with I.unroll(rows * _SUMS) as i:
            total[i] = splat(0.0, RANK)
        by_two = self.shape.dtype == "uint8"  # even k of eight, then odd ones
        with I.serial(self.shape.k // 8) as eight:
            for i in range(8):
                column[0] = _numbers(self.A, (block, part), eight * 8 + i)
                k, u = eight * 8 + (i % 4 * 2 + i // 4 if by_two else i), i % _SUMS
                with I.unroll(rows) as r:
                    total[r * _SUMS + u] = total[r * _SUMS + u] + splat(self.X[row + r, k], RANK) * column[0]
        with I.unroll(rows) as r:
            summed = sum((total[r * _SUMS + u] for u in range(1, _SUMS)), total[r * _SUMS])
            t[r] = summed * read(self.scale, (block, part, 0), RANK)

    def _expand(self, row: Expr, rows: int, block: Expr, vector: Expr, vectors: int, t: Registers) -> None:
        """y += B t in so many vectors of columns, from `vector` on."""
        total, column = Registers(rows * vectors, 16), Registers(vectors, 16)
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            total[r * vectors + v] = read(self.Y, (row + r, (vector + v) * 16), 16)
        with I.serial(RANK // 4) as four:
            for i in range(4):
                with I.unroll(vectors) as v:
                    column[v] = _numbers(self.B, (block, vector + v), four * 4 + i)
                with I.unroll(rows) as r, I.unroll(vectors) as v:
                    x = splat(t.memory[r, four * 4 + i], 16)
                    total[r * vectors + v] = total[r * vectors + v] + x * column[v]
        with I.unroll(rows) as r, I.unroll(vectors) as v:
            store(self.Y, (row + r, (vector + v) * 16), total[r * vectors + v], 16)


def _numbers(buffer: Buffer, at: tuple[Expr, Expr], i: Expr) -> Expr:
    """16 numbers of A or B, as they are stored: the i-th of each rank or column, as float32."""
    if str(buffer.dtype) != "uint8":
        return load(buffer, (*at, i, 0), 16)
    words = I.reinterpret("uint32x16", read(buffer, (*at, i // 4, 0), 64))
    return codes(words, i % 4, 8) - splat(128.0, 16)
