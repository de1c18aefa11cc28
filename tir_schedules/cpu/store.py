"""Store a register tile to y, or add it to y."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.vectors import Registers, read, splat, store


def store_row(y: Buffer, row: Expr, block: Expr, total: Registers) -> None:
    """y[row, 16 * block :] = total[0], as far as there are columns."""
    n = int(y.shape[1])
    with I.If(block < n // 16):
        with I.Then():
            store(y, (row, block * 16), total[0], 16)
        with I.Else(), I.serial(n % 16) as lane:
            put(y, (row, block * 16 + lane), total.memory[0, lane])


@dataclass(frozen=True)
class Output:
    """What a register tile covers: y[row : row + rows, 16 * block : 16 * (block + blocks)].

    Rows from `row_end` on and columns past the end of y are left out. With `index` the rows of y are index[row],
    index[row + 1], ... Where `add` holds the tile is added to what is there. From one block of 16 columns to the next
    are `apart` blocks of y.
    """

    y: Buffer
    row: Expr
    row_end: Expr
    block: Expr
    rows: int
    blocks: int
    add: Expr = False
    index: Buffer | None = None
    apart: int = 1

    def at(self, b: Expr) -> Expr:
        """Which block of y the b-th of the tile is."""
        return self.block + b * self.apart

    @property
    def step(self) -> int:
        """How many blocks of y further the next tile is."""
        return 1 if self.apart > 1 else self.blocks

    def store(self, total: Registers) -> None:
        """y (+)= total, the vectors of a row next to each other."""
        lanes, n = total.lanes, int(self.y.shape[1])
        per_block = 16 // lanes
        vectors = self.blocks * per_block
        with I.unroll(self.rows) as r, I.If(self.row + r < self.row_end), I.Then():
            row = self.row + r if self.index is None else self.index[self.row + r]
            with I.unroll(vectors) as v, I.If(self.at(v // per_block) < n // 16):
                i, column = r * vectors + v, self.at(v // per_block) * 16 + v % per_block * lanes
                with I.Then():
                    self._store(total, i, 0, row, column, lanes)
                with I.Else(), I.serial(lanes) as lane, I.If(column + lane < n), I.Then():
                    self._store(total, i, lane, row, column + lane, 1)

    def restore(self, total: Registers, stored: Expr) -> None:
        """total = y where `stored` holds, else zeros."""
        lanes, n = total.lanes, int(self.y.shape[1])
        per_block = 16 // lanes
        vectors = self.blocks * per_block
        with I.unroll(self.rows) as r, I.unroll(vectors) as v:
            i, row, block = r * vectors + v, self.row + r, self.at(v // per_block)
            column = block * 16 + v % per_block * lanes
            total[i] = splat(0.0, lanes)
            with I.If(tirx.all(stored, row < self.row_end)), I.Then(), I.If(block < n // 16):
                with I.Then():
                    total[i] = read(self.y, (row, column), lanes)
                with I.Else(), I.serial(lanes) as lane, I.If(column + lane < n), I.Then():
                    put(total.memory, (i, lane), self.y[row, column + lane])

    def _store(self, total: Registers, i: Expr, lane: Expr, row: Expr, column: Expr, lanes: int) -> None:
        """`lanes` numbers from total[i, lane] on to y[row, column]."""
        if self.add is not False:
            with I.If(self.add), I.Then():
                summed = read(total.memory, (i, lane), lanes) + read(self.y, (row, column), lanes)
                store(total.memory, (i, lane), summed, lanes)
        store(self.y, (row, column), read(total.memory, (i, lane), lanes), lanes)
