"""Scans of Mamba on CPUs: a thread has blocks of 16 channels, whose states stay in its cache; see `ssm_shape.py`.

A step reads and writes each state once. For prompts, `TOKENS` tokens go over a vector of the state while it is in a
register: three operations for each number and token, where products of chunks have two and more to combine them.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import softplus
from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.vectors import Registers, load, read, scratch, splat, store, value
from tir_schedules.ssm_shape import Scan, SsmShape

TOKENS = 4
_SERIAL = 32768  # numbers of states; waking threads for fewer costs more than the work


def ssm_scan(shape: SsmShape) -> tirx.PrimFunc:
    """The kernel that `SsmShape` describes."""

    def body(scan: Scan) -> None:
        steps, decays = scratch(scan.m * shape.heads), scratch(scan.m * shape.heads)
        _discretize(scan, steps, decays)
        sequences = value(I.cast(scan.step.sequences, "int64"))
        count = value(sequences * shape.blocks)

        def emit(index: Expr) -> None:
            _Block(scan, steps, decays, value(index // sequences)).scan(value(index % sequences))

        with I.If(count * (shape.lanes * shape.state_size) <= I.int64(_SERIAL)):
            with I.Then(), I.serial(count) as i:
                emit(i)
            with I.Else(), I.parallel(count) as i:
                emit(i)

    return shape.function(body)


def _discretize(scan: Scan, steps: Buffer, decays: Buffer) -> None:
    """dt and, where a head has one, exp(-exp(a_log) dt) of each row and head: `lanes` heads at once."""
    heads = scan.shape.heads
    lanes = next(n for n in (16, 8, 4, 2, 1) if heads % n == 0)

    def splat_of(number: float) -> Expr:
        return splat(number, lanes)

    with I.serial(scan.m) as row, I.serial(heads // lanes) as i:
        at = value(i * lanes)
        if scan.shape.steady:
            dt = splat_of(1.0)
        else:
            dt = load(scan.projected, (row, scan.shape.width - heads + at), lanes) + load(scan.dt_bias, at, lanes)
            dt = value(softplus(value(dt), splat_of, value))
        store(steps, row * heads + at, dt, lanes)
        if not scan.shape.channelwise:
            rate = value(I.exp(load(scan.a_log, at, lanes)))
            store(decays, row * heads + at, I.exp(splat(0.0, lanes) - dt * rate), lanes)


class _Block:
    """A block of channels, over the rows of a sequence."""

    def __init__(self, scan: Scan, steps: Buffer, decays: Buffer, block: Expr) -> None:
        self.of, self.steps, self.decays, self.block = scan, steps, decays, block
        shape = scan.shape
        self.lanes, self.head, self.b = shape.lanes, value(shape.head(block)), value(shape.b_column(block))
        if shape.channelwise:
            self.rates, size = Registers(shape.state_size, self.lanes), shape.state_size
            with I.serial(size) as n:
                at = self.head * size + n
                logarithms = scan.a_log[at if self.lanes == 1 else I.ramp(at, size, self.lanes)]
                self.rates[n] = splat(0.0, self.lanes) - I.exp(logarithms)

    def scan(self, s: Expr) -> None:
        """All rows of sequence s: of one row without a copy of the state."""
        step, shape = self.of.step, self.of.shape
        begin, end = (value(I.cast(step.row_begin(one), "int64")) for one in (s, s + 1))
        slot, target = value(step.slot_read(s)), value(step.slot_write(s))
        first = value(self.block * (shape.state_size * self.lanes))

        def before(n: Expr) -> Expr:
            kept = load(self.of.state, (slot, first + n * self.lanes), self.lanes)
            return I.if_then_else(slot >= 0, kept, splat(0.0, self.lanes))

        def after(n: Expr, vector: Expr) -> None:
            with I.If(target >= 0), I.Then():
                store(self.of.state, (target, first + n * self.lanes), vector, self.lanes)

        with I.If(end - begin == 1):
            with I.Then():
                self._tokens(begin, 1, before, after)
            with I.Else():
                self._rows(begin, end, first, before, after)

    def _rows(
        self, begin: Expr, end: Expr, first: Expr, before: Callable[[Expr], Expr], after: Callable[[Expr, Expr], None]
    ) -> None:
        """Several rows, over a copy of the state."""
        size, lanes = self.of.shape.state_size, self.lanes
        copy = scratch(size * lanes)

        def kept(n: Expr) -> Expr:
            return read(copy, n * lanes, lanes)

        def keep(n: Expr, vector: Expr) -> None:
            store(copy, n * lanes, vector, lanes)

        with I.serial(size) as n:
            keep(n, before(n))
        each = self.of.step.has_slots_of_rows
        whole = value(I.if_then_else(each, I.int64(0), (end - begin) // TOKENS))
        with I.serial(whole) as i:
            self._tokens(value(begin + i * TOKENS), TOKENS, kept, keep)
        with I.serial(begin + whole * TOKENS, end) as row:
            self._tokens(row, 1, kept, keep)
            with I.If(each), I.Then():
                target = value(self.of.step.slot_of_row(row))
                with I.If(target >= 0), I.Then(), I.serial(size) as n:
                    store(self.of.state, (target, first + n * lanes), kept(n), lanes)
        with I.serial(size) as n:
            after(n, kept(n))

    def _tokens(
        self, row: Expr, count: int, before: Callable[[Expr], Expr], after: Callable[[Expr, Expr], None]
    ) -> None:
        """`count` rows over each vector of the state."""
        of, shape, lanes = self.of, self.of.shape, self.lanes
        decays, inputs, outputs = (Registers(count, lanes) for _ in range(3))
        skip = splat(0.0, lanes) if shape.steady else value(self._of_heads(of.skip, self.head))
        for t in range(count):
            at = value((row + t) * shape.heads + self.head)
            x = value(load(of.xbc, (row + t, self.block * lanes), lanes))
            decays[t] = self._of_heads(self.steps if shape.channelwise else self.decays, at)
            inputs[t] = x * self._of_heads(self.steps, at)
            outputs[t] = x * skip
        state = Registers(1, lanes)
        with I.serial(shape.state_size) as n:
            state[0] = before(n)
            for t in range(count):
                b, c = (of.xbc[row + t, self.b + part * shape.groups * shape.state_size + n] for part in (0, 1))
                decay = I.exp(decays[t] * self.rates[n]) if shape.channelwise else decays[t]
                state[0] = state[0] * decay + inputs[t] * splat(b, lanes)
                outputs[t] = outputs[t] + state[0] * splat(c, lanes)
            after(n, state[0])
        for t in range(count):
            store(of.y, (row + t, self.block * lanes), outputs[t], lanes)

    def _of_heads(self, numbers: Buffer, at: Expr) -> Expr:
        """The number of the block's head in all lanes, or those of the heads that its channels are."""
        return load(numbers, at, self.lanes) if self.of.shape.channelwise else splat(numbers[at], self.lanes)
