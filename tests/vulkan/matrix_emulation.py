"""Matrices of a subgroup without cooperative matrices: what `device_calls` says of them, as loops of every lane.

A lane has whole factors, and of a sum the numbers lane, lane + size, ... Not for use: to check numbers of schedules on
devices without SPV_KHR_cooperative_matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.device_calls import Matrix
from tir_schedules.gpu.kernel import half_to_float, keep, local


@dataclass
class Emulation:
    """Statements in place of the calls in one kernel, of subgroups of `size`."""

    size: int
    memory: dict[int, Buffer] = field(default_factory=dict)  # number of a matrix -> its numbers in a lane

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("clear", "load", "multiply", "store"):
            patch.setattr(device_calls, f"matrix_{name}", getattr(self, name))

    def _share(self, matrix: Matrix) -> int:
        count = matrix.rows * matrix.columns
        assert count % self.size == 0
        return count // self.size

    def _place(self, matrix: Matrix, i: Expr) -> tuple[Expr, Expr]:
        """Row and column of a lane's number."""
        at = keep(i * self.size + device_calls.lane())
        return keep(at // matrix.columns), keep(at % matrix.columns)

    def clear(self, matrix: Matrix) -> None:
        found = self.memory[matrix.number] = local(self._share(matrix))
        with I.serial(0, self._share(matrix)) as i:
            put(found, i, 0.0)

    def load(self, matrix: Matrix, words: Buffer, index: Expr, stride: int, *, by_columns: bool) -> None:
        found = self.memory[matrix.number] = local(matrix.rows * matrix.columns)
        with I.serial(0, matrix.rows) as row, I.serial(0, matrix.columns) as column:
            line, at = (column, row) if by_columns else (row, column)
            word = keep(words[index + line * stride + at // 2])
            half = I.Select(at % 2 == 0, I.bitwise_and(word, I.uint32(0xFFFF)), I.shift_right(word, I.uint32(16)))
            put(found, row * matrix.columns + column, half_to_float(keep(I.cast(half, "int32")), signed=True))

    def multiply(self, total: Matrix, left: Matrix, right: Matrix) -> None:
        sums, a, b = (self.memory[matrix.number] for matrix in (total, left, right))
        with I.serial(0, self._share(total)) as i:
            row, column = self._place(total, i)
            with I.serial(0, left.columns) as k:
                put(sums, i, sums[i] + a[row * left.columns + k] * b[k * right.columns + column])

    def store(self, matrix: Matrix, words: Buffer, index: Expr, stride: int) -> None:
        with I.serial(0, self._share(matrix)) as i:
            row, column = self._place(matrix, i)
            number = I.reinterpret("uint32", self.memory[matrix.number][i])
            put(words, index + row * stride + column, number)
