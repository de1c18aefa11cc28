"""The gated delta rule for CPUs; see `delta_shape.py`.

A step takes some columns of a head's state, which stay in the first cache while they are read, corrected and written.
A prompt takes chunks of rows; see `delta_chunks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.delta_chunks import ChannelChunks, Chunks
from tir_schedules.cpu.delta_rows import lanes_of_size, lengths, store_decays
from tir_schedules.cpu.vectors import Registers, lanes_of, load, prefetch, read, scratch, splat, store, value
from tir_schedules.delta_shape import DeltaShape, Inputs
from tir_schedules.step import Step


def gated_delta(shape: DeltaShape) -> tirx.PrimFunc:
    """The kernel that `DeltaShape` describes."""

    def body(of: Inputs, y: Buffer, m: Expr) -> None:
        parts = 1 if shape.many else shape.value_dim // shape.columns
        tasks = shape.value_heads * parts
        with I.parallel(I.cast(of.step.sequences, "int64") * tasks) as task:
            s, head = value(task // tasks), value(task % tasks // parts)
            if shape.many:
                (ChannelChunks if shape.channelwise else Chunks)(of, y, s, head).run()
            else:
                _step(of, y, s, head, value(task % parts))

    return shape.function(body)


def _step(of: Inputs, y: Buffer, s: Expr, head: Expr, block: Expr) -> None:
    """All rows of a sequence in some columns of a head, one after the other."""
    shape, step = of.shape, of.step
    size, lanes = shape.key_dim * shape.columns, lanes_of_size(shape.columns)
    slot, target = value(step.slot_read(s)), value(step.slot_write(s))
    begin, end = value(step.row_begin(s)), value(step.row_begin(s + 1))
    first = value(head * shape.state_size + block * size)

    def stored(i: Expr) -> Expr:
        return I.if_then_else(slot >= 0, load(of.state, (slot, first + i), lanes), splat(0.0, lanes))

    def write(i: Expr, number: Expr) -> None:
        with I.If(target >= 0), I.Then():
            store(of.state, (target, first + i), number, lanes)
        prefetch(of.state, (I.max(slot, 0), first + size + i))  # what the next task reads

    column = value(block * shape.columns)
    with I.If(end - begin == 1):
        with I.Then():
            _advance(of, y, begin, head, column, stored, write)
        with I.Else():
            kept = scratch(size)
            with I.serial(size // lanes) as i:
                store(kept, i * lanes, stored(i * lanes), lanes)
            with I.serial(begin, end) as row:
                _advance(
                    of, y, row, head, column, lambda i: read(kept, i, lanes), lambda i, x: store(kept, i, x, lanes)
                )
                to = value(I.if_then_else(row + 1 == end, target, _slot_of_row(step, row)))
                with I.If(to >= 0), I.Then(), I.serial(size // lanes) as i:
                    store(of.state, (to, first + i * lanes), read(kept, i * lanes, lanes), lanes)


def _slot_of_row(step: Step, row: Expr) -> Expr:
    return I.if_then_else(step.has_slots_of_rows, step.slot_of_row(row), -1)


def _advance(
    of: Inputs, y: Buffer, row: Expr, head: Expr, column: Expr, load_state: Callable[[Expr], Expr],
    store_state: Callable[[Expr, Expr], None],
) -> None:  # fmt: skip
    """One row in the columns of a block: y = q D S + (q k) d, S = D S + k^T d, d = beta (v - k D S).

    D is exp(g), of all rows of S or of each.
    """
    shape, columns, each = of.shape, of.shape.columns, of.shape.channelwise
    lanes = lanes_of_size(columns)
    count = columns // lanes
    q_scale, k_scale, qk = lengths(of, row, head)
    beta = value(of.beta(row, head))
    if each:
        decays, decay = scratch(shape.key_dim), I.float32(1)
        store_decays(of, row, head, decays, 0)
    else:
        decay = value(I.exp(of.log_decay(row, head)))
    q, k, v_at = value(of.q(head)), value(of.k(head)), value(of.v(head) + column)
    sums = Registers(2 * count, lanes)
    for v in range(2 * count):
        sums[v] = splat(0.0, lanes)
    with I.serial(shape.key_dim) as i:
        q_i, k_i = (splat(value(load(of.qkv, (row, at + i), 1)), lanes) for at in (q, k))
        for v in range(count):
            number = load_state(i * columns + v * lanes)
            number = value(number * splat(decays[i], lanes) if each else number)
            sums[v] = sums[v] + q_i * number
            sums[count + v] = sums[count + v] + k_i * number
    for v in range(count):
        seen = sums[count + v] * splat(value(decay * k_scale), lanes)
        sums[count + v] = (load(of.qkv, (row, v_at + v * lanes), lanes) - seen) * splat(beta, lanes)
        found = sums[v] * splat(value(decay * q_scale), lanes) + sums[count + v] * splat(qk, lanes)
        at = head * shape.value_dim + column + v * lanes
        store(y, (row, at), I.cast(found, lanes_of(shape.dtype, lanes)), lanes)
    with I.serial(shape.key_dim) as i:
        k_i = splat(value(load(of.qkv, (row, k + i), 1) * k_scale), lanes)
        for v in range(count):
            at, kept = i * columns + v * lanes, splat(decays[i] if each else decay, lanes)
            store_state(at, load_state(at) * kept + k_i * sums[count + v])
