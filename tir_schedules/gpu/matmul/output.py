"""The output of a matmul whose lanes have four neighbouring columns, with the gate of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu.kernel import keep
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS
from tir_schedules.gpu.matmul.packed_loads import LANE_ROWS, put_neighbours


@dataclass(frozen=True)
class Output:
    """y [m, width]; with an activation, that of one half of the weight's rows times the other half."""

    flat: Buffer
    width: int
    activation: Callable[[Expr], Expr] | None

    def put(self, row: Expr, block: Expr, values: Sequence[Expr], lane: Expr) -> None:
        """Store a lane's columns of a block; with an activation, `values` are the gates, then the others."""
        if self.activation is not None:
            gates, others = values[:LANE_ROWS], values[LANE_ROWS:]
            values = [self.activation(gate) * other for gate, other in zip(gates, others)]
        column = keep(block * BLOCK_ROWS + lane * LANE_ROWS)
        if self.width % BLOCK_ROWS == 0:
            put_neighbours(self.flat, row * self.width + column, values)
            return
        for i, value in enumerate(values):
            with I.If(column + i < self.width), I.Then():
                put(self.flat, row * self.width + column + i, value)
