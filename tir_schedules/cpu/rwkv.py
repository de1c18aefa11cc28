"""The recurrence of RWKV-7 for CPUs: a thread has a head of a sequence, whose state stays in its first cache.

See `rwkv_shape.py`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.delta_rows import lanes_of_size
from tir_schedules.cpu.vectors import Registers, load, read, scratch, splat, store, value
from tir_schedules.rwkv_shape import Rows, RwkvShape


def rwkv(shape: RwkvShape) -> tirx.PrimFunc:
    """The kernel that `RwkvShape` describes."""

    def body(of: Rows) -> None:
        with I.parallel(I.cast(of.step.sequences, "int64") * shape.heads) as task:
            _head(of, value(task // shape.heads), value(task % shape.heads))

    return shape.function(body)


def _head(of: Rows, s: Expr, head: Expr) -> None:
    """All rows of a sequence in a head, over a copy of its state."""
    step, size = of.step, of.shape.state_size
    lanes = lanes_of_size(of.shape.dim)
    slot, target = value(step.slot_read(s)), value(step.slot_write(s))
    begin, end = value(step.row_begin(s)), value(step.row_begin(s + 1))
    kept, first = scratch(size), value(head * size)

    with I.serial(size // lanes) as i:
        before = load(of.state, (slot, first + i * lanes), lanes)
        store(kept, i * lanes, I.if_then_else(slot >= 0, before, splat(0.0, lanes)), lanes)
    with I.serial(begin, end) as row:
        _advance(of, row, head, kept, lanes)
        drafted = I.if_then_else(step.has_slots_of_rows, step.slot_of_row(row), -1)
        to = value(I.if_then_else(row + 1 == end, target, drafted))
        with I.If(to >= 0), I.Then(), I.serial(size // lanes) as i:
            store(of.state, (to, first + i * lanes), read(kept, i * lanes, lanes), lanes)


def _advance(of: Rows, row: Expr, head: Expr, state: Buffer, lanes: int) -> None:
    """One row, over the state and back."""
    dim = of.shape.dim
    count, at = dim // lanes, value(head * dim)
    removed, values, found = (Registers(count, lanes) for _ in range(3))

    def number(of_row: Buffer, i: Expr) -> Expr:
        return splat(value(load(of_row, (row, at + i), 1)), lanes)

    for n in range(count):
        removed[n] = found[n] = splat(0.0, lanes)
        values[n] = load(of.v, (row, at + n * lanes), lanes)
    with I.serial(dim) as i:
        a = number(of.a, i)
        for n in range(count):
            removed[n] = removed[n] + a * read(state, i * dim + n * lanes, lanes)
    with I.serial(dim) as i:
        r, w, k, b = (number(one, i) for one in (of.r, of.w, of.k, of.b))
        for n in range(count):
            place = i * dim + n * lanes
            after = value(w * read(state, place, lanes) + b * removed[n] + k * values[n])
            store(state, place, after, lanes)
            found[n] = found[n] + r * after
    for n in range(count):
        store(of.y, (row, at + n * lanes), found[n], lanes)
