"""The gated delta rule for GPUs: rows one after the other, heads and columns of their states side by side; prompts by
chunks where these fit (`delta_chunks.py`).

A workgroup has up to 32 columns of a head's state in registers, some rows of each column in every invocation, and reads
and writes them once in a step. See `delta_shape.py`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.delta_shape import EPS, DeltaShape, Inputs
from tir_schedules.gpu.delta_chunks import fits, gated_delta_chunks
from tir_schedules.gpu.kernel import barrier, keep, launch, local, pin, shared

_SEQUENCES = 64  # that have workgroups of their own


def gated_delta(shape: DeltaShape) -> tirx.PrimFunc:
    """The kernel that `DeltaShape` describes."""
    return gated_delta_chunks(shape) if fits(shape) else gated_delta_rows(shape)


def gated_delta_rows(shape: DeltaShape) -> tirx.PrimFunc:
    """The same, row by row."""
    columns, blocks = shape.columns, shape.value_dim // shape.columns
    parts = next(n for n in (8, 4, 2, 1) if shape.key_dim % n == 0)

    def body(of: Inputs, y: Buffer, m: Expr) -> None:
        groups = I.min(m, _SEQUENCES)
        with launch(columns * parts, shape.value_heads * blocks, groups) as (bx, by, tx):
            work = _Columns(of, y, parts, tx)
            head, block = keep(bx // blocks), keep(bx % blocks)
            step = I.cast(groups, "int32")
            with I.serial(0, I.truncdiv(of.step.sequences - by + step - 1, step)) as i:
                work.run(by + i * step, head, block)

    return shape.function(body)


class _Columns:
    """Some columns of a head's state, of which an invocation has `each` neighbouring rows in one column.

    `sums` are those of k S and q S by invocation, `lengths` the parts of q q, k k and q k; rows take turns with two of
    each, so that a row needs one barrier.
    """

    def __init__(self, of: Inputs, y: Buffer, parts: int, tx: Expr) -> None:
        self.of, self.y, self.shape, self.columns, self.parts, self.tx = of, y, of.shape, of.shape.columns, parts, tx
        self.each = of.shape.key_dim // parts
        self.state, self.k = local(self.each), local(self.each)
        self.sums, self.lengths = shared(4 * self.columns * parts), shared(6 * parts)
        self.totals = local(5)
        if self.shape.channelwise:
            self.decays = shared(self.shape.key_dim)

    def run(self, s: Expr, head: Expr, block: Expr) -> None:
        """All rows of a sequence."""
        of, shape, step = self.of, self.shape, self.of.step
        slot, target = pin(step.slot_read(s)), pin(step.slot_write(s))
        part, column = keep(self.tx // self.columns), keep(block * self.columns + self.tx % self.columns)
        row = block * shape.key_dim + part * self.each
        first = keep(head * shape.state_size + row * self.columns + self.tx % self.columns)
        for j in range(self.each):
            at = (slot, first + j * self.columns)
            put(self.state, j, I.if_then_else(slot >= 0, of.state[at], I.float32(0)))
        barrier()  # the last sequence's sums are read
        with I.serial(pin(step.row_begin(s)), pin(step.row_begin(s + 1))) as row:
            self._advance(row, head, part, column)
            with I.If(step.has_slots_of_rows), I.Then():
                self._keep(first, pin(step.slot_of_row(row)))
        self._keep(first, target)

    def _keep(self, first: Expr, target: Expr) -> None:
        """The state to a slot."""
        with I.If(target >= 0), I.Then():
            for j in range(self.each):
                put(self.of.state, (target, first + j * self.columns), self.state[j])

    def _advance(self, row: Expr, head: Expr, part: Expr, column: Expr) -> None:
        """One row: y = q D S + (q k) d, S = D S + k^T d, d = beta (v - k D S), D = exp(g) of all rows or of each."""
        of, totals, each = self.of, self.totals, self.shape.channelwise
        if each:
            self._find_decays(row, head, part)
        self._add_up(row, head, part)
        decay = I.float32(1) if each else pin(I.exp(of.log_decay(row, head)))
        beta = pin(of.beta(row, head))
        v = pin(f32(of.qkv[row, of.v(head) + column]))
        q_scale = pin(I.float32(of.q_scale) / I.sqrt(totals[2] + I.float32(EPS)))
        k_scale = pin(I.float32(1) / I.sqrt(totals[3] + I.float32(EPS)))
        correction = pin(beta * (v - decay * k_scale * totals[0]))
        with I.If(part == 0), I.Then():
            found = decay * q_scale * totals[1] + totals[4] * q_scale * k_scale * correction
            put(self.y, (row, head * self.shape.value_dim + column), found)
        for j in range(self.each):
            put(self.state, j, decay * self.state[j] + k_scale * self.k[j] * correction)

    def _find_decays(self, row: Expr, head: Expr, part: Expr) -> None:
        """The state's rows decay."""
        threads, size = self.columns * self.parts, self.shape.key_dim
        for first in range(0, size, threads):
            channel = keep(self.tx + first)
            with I.If(channel < size), I.Then():
                put(self.decays, channel, I.exp(self.of.log_decay(row, head, channel)))
        barrier()
        for j in range(self.each):
            put(self.state, j, self.state[j] * self.decays[part * self.each + j])

    def _add_up(self, row: Expr, head: Expr, part: Expr) -> None:
        """`totals`: k S, q S, q q, k k and q k of a row, with q and k as they are."""
        of, totals, threads = self.of, self.totals, self.columns * self.parts
        q, k = (pin(at + part * self.each) for at in (of.q(head), of.k(head)))
        for which in range(5):
            put(totals, which, I.float32(0))
        for j in range(self.each):
            q_j = keep(f32(of.qkv[row, q + j]))
            put(self.k, j, f32(of.qkv[row, k + j]))
            k_j, s_j = self.k[j], self.state[j]
            for which, product in enumerate((k_j * s_j, q_j * s_j, q_j * q_j, k_j * k_j, q_j * k_j)):
                add(totals, which, product)
        turn = pin(I.cast(row % 2, "int32"))
        for which in range(2):
            put(self.sums, (turn * 2 + which) * threads + self.tx, totals[which])
        with I.If(self.tx % self.columns == 0), I.Then():
            for which in range(3):
                put(self.lengths, (turn * 3 + which) * self.parts + part, totals[2 + which])
        barrier()
        for which in range(5):
            put(totals, which, I.float32(0))
        for p in range(self.parts):
            for which in range(2):
                at = (turn * 2 + which) * threads + p * self.columns + self.tx % self.columns
                add(totals, which, self.sums[at])
            for which in range(3):
                add(totals, 2 + which, self.lengths[(turn * 3 + which) * self.parts + p])
