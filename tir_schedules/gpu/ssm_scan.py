"""Scans of Mamba on GPUs: a workgroup has a block of channels, whose states are in registers; see `ssm_shape.py`."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import softplus
from tir_schedules.builder import Expr, add, f32, put
from tir_schedules.gpu.kernel import barrier, ceildiv, ceildiv_by, keep, launch, local, pin, shared
from tir_schedules.ssm_shape import Scan, SsmShape

_THREADS = 256
_TOKENS = 8  # between barriers
_SEQUENCES = 64  # of workgroups for a block; one has several sequences where there are more


def ssm_scan(shape: SsmShape) -> tirx.PrimFunc:
    """The kernel that `SsmShape` describes."""
    parts = next(n for n in range(_THREADS // shape.lanes, 0, -1) if shape.state_size % n == 0)

    def body(scan: Scan) -> None:
        rows = I.min(scan.m, I.int64(_SEQUENCES))
        with launch(shape.lanes * parts, shape.blocks, rows) as (block, first, tx):
            group = _Workgroup(scan, parts, block, tx)
            step = I.cast(rows, "int32")
            with I.serial(0, ceildiv_by(scan.step.sequences - first, step)) as i:
                group.scan(keep(first + i * step))

    return shape.function(body)


class _Workgroup:
    """A block of channels: an invocation has one of them, and a part of the numbers of its state."""

    def __init__(self, scan: Scan, parts: int, block: Expr, tx: Expr) -> None:
        self.of, self.tx, self.parts, shape = scan, tx, parts, scan.shape
        self.threads, self.count = shape.lanes * parts, shape.state_size // parts
        self.heads = shape.lanes if shape.channelwise else 1  # of a block
        self.steps, self.decays = shared(_TOKENS * self.heads), shared(_TOKENS)
        self.sums = shared(_TOKENS * self.threads)
        self.state = local(self.count)
        self.lane, part = keep(tx % shape.lanes), keep(tx // shape.lanes)
        self.number = keep(part * self.count)
        self.column, self.head = keep(block * shape.lanes), keep(shape.head(block))
        self.b = keep(shape.b_column(block) + self.number)
        self.at = keep((block * shape.state_size + self.number) * shape.lanes + self.lane)
        if shape.channelwise:
            self.rates, at = local(self.count), keep((self.head + self.lane) * shape.state_size + self.number)
            for i in range(self.count):
                put(self.rates, i, I.float32(0) - I.exp(scan.a_log[at + i]))

    def scan(self, s: Expr) -> None:
        """All rows of sequence s."""
        step, lanes = self.of.step, self.of.shape.lanes
        begin, end = pin(step.row_begin(s)), pin(step.row_begin(s + 1))
        slot, target = pin(step.slot_read(s)), pin(step.slot_write(s))
        for i in range(self.count):
            kept = self.of.state[slot, self.at + i * lanes]
            put(self.state, i, I.if_then_else(slot >= 0, kept, I.float32(0)))
        with I.serial(0, ceildiv(end - begin, _TOKENS)) as i:
            row = keep(begin + i * _TOKENS)
            self._tokens(row, keep(I.min(end - row, _TOKENS)))
        self._keep(target)

    def _keep(self, target: Expr) -> None:
        """The state to a slot."""
        with I.If(target >= 0), I.Then():
            for i in range(self.count):
                put(self.of.state, (target, self.at + i * self.of.shape.lanes), self.state[i])

    def _tokens(self, row: Expr, count: Expr) -> None:
        """`count` rows."""
        of, shape = self.of, self.of.shape
        barrier()
        self._each(count, self.heads, lambda t, head: self._discretize(row, t, head))
        barrier()
        with I.serial(0, count) as t:
            x = keep(f32(of.xbc[row + t, self.column + self.lane]))
            dt = keep(self.steps[t * self.heads + self.lane] if shape.channelwise else self.steps[t])
            inputs, total = keep(x * dt), local(1)
            put(total, 0, I.float32(0))
            for i in range(self.count):
                b, c = (f32(of.xbc[row + t, self.b + part * shape.groups * shape.state_size + i]) for part in (0, 1))
                decay = I.exp(dt * self.rates[i]) if shape.channelwise else self.decays[t]
                put(self.state, i, self.state[i] * decay + inputs * b)
                add(total, 0, self.state[i] * c)
            put(self.sums, t * self.threads + self.tx, total[0])
            with I.If(of.step.has_slots_of_rows), I.Then():
                self._keep(pin(of.step.slot_of_row(row + t)))
        barrier()
        self._each(count, shape.lanes, lambda t, lane: self._sum(row, t, lane))

    def _each(self, count: Expr, size: int, emit: Callable[[Expr, Expr], None]) -> None:
        """emit(t, i) for t < count and i < size."""
        for first in range(0, _TOKENS * size, self.threads):
            at = keep(self.tx + first)
            with I.If(at < count * size), I.Then():
                emit(keep(at // size), keep(at % size))

    def _discretize(self, row: Expr, t: Expr, i: Expr) -> None:
        """dt of the block's i-th head in a row and, where a head has one, exp(-exp(a_log) dt)."""
        of, shape, head = self.of, self.of.shape, keep(self.head + i)
        dt = I.float32(1)
        if not shape.steady:
            x = f32(of.projected[row + t, shape.width - shape.heads + head]) + of.dt_bias[head]
            dt = keep(softplus(keep(x), I.float32, keep))
        put(self.steps, t * self.heads + i, dt)
        if not shape.channelwise:
            put(self.decays, t, I.exp(I.float32(0) - dt * I.exp(of.a_log[head])))

    def _sum(self, row: Expr, t: Expr, lane: Expr) -> None:
        """A number of y."""
        of, total = self.of, local(1)
        head = self.head + lane if of.shape.channelwise else self.head
        skip = I.float32(0) if of.shape.steady else of.skip[head]
        put(total, 0, f32(of.xbc[row + t, self.column + lane]) * skip)
        with I.serial(0, self.parts) as part:
            add(total, 0, self.sums[t * self.threads + part * of.shape.lanes + lane])
        put(of.y, (row + t, self.column + lane), total[0])
