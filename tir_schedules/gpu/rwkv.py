"""The recurrence of RWKV-7 for GPUs: a workgroup has a head, an invocation a column of its state, in registers.

See `rwkv_shape.py`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr, add, put
from tir_schedules.gpu.kernel import barrier, ceildiv_by, keep, launch, local, pin, shared
from tir_schedules.rwkv_shape import Rows, RwkvShape

_SEQUENCES = 64  # of workgroups for a head; one has several sequences where there are more
_OF_KEYS = ("r", "w", "k", "a", "b")


def rwkv(shape: RwkvShape) -> tirx.PrimFunc:
    """The kernel that `RwkvShape` describes."""

    def body(of: Rows) -> None:
        rows = I.min(of.m, I.int64(_SEQUENCES))
        with launch(shape.dim, shape.heads, rows) as (head, first, tx):
            column = _Column(of, head, tx)
            step = I.cast(rows, "int32")
            with I.serial(0, ceildiv_by(of.step.sequences - first, step)) as i:
                column.scan(keep(first + i * step))

    return shape.function(body)


class _Column:
    """A column of a head's state: an invocation has the number of each key."""

    def __init__(self, of: Rows, head: Expr, tx: Expr) -> None:
        self.of, self.tx, self.dim = of, tx, of.shape.dim
        self.state = local(self.dim)
        self.vectors = {name: shared(self.dim) for name in _OF_KEYS}
        self.column = keep(head * self.dim + tx)
        self.at = keep(head * of.shape.state_size + tx)

    def scan(self, s: Expr) -> None:
        """All rows of sequence s."""
        step = self.of.step
        begin, end = pin(step.row_begin(s)), pin(step.row_begin(s + 1))
        slot, target = pin(step.slot_read(s)), pin(step.slot_write(s))
        for i in range(self.dim):
            kept = self.of.state[slot, self.at + i * self.dim]
            put(self.state, i, I.if_then_else(slot >= 0, kept, I.float32(0)))
        with I.serial(begin, end) as row:
            self._row(row)
            with I.If(step.has_slots_of_rows), I.Then():
                self._keep(pin(step.slot_of_row(row)))
        self._keep(target)

    def _keep(self, target: Expr) -> None:
        """The column to a slot."""
        with I.If(target >= 0), I.Then():
            for i in range(self.dim):
                put(self.of.state, (target, self.at + i * self.dim), self.state[i])

    def _row(self, row: Expr) -> None:
        barrier()
        for name, numbers in self.vectors.items():
            put(numbers, self.tx, getattr(self.of, name)[row, self.column])
        barrier()
        removed, found = local(1), local(1)
        put(removed, 0, I.float32(0))
        put(found, 0, I.float32(0))
        for i in range(self.dim):
            add(removed, 0, self.vectors["a"][i] * self.state[i])
        own = pin(self.of.v[row, self.column])
        for i in range(self.dim):
            r, w, k, b = (self.vectors[name][i] for name in ("r", "w", "k", "b"))
            put(self.state, i, w * self.state[i] + b * removed[0] + k * own)
            add(found, 0, r * self.state[i])
        put(self.of.y, (row, self.column), found[0])
