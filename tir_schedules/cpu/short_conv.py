"""Short convolutions for CPUs: vectors of channels, rows in parallel where there are many; see `conv_shape.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.conv_shape import ConvShape, Inputs
from tir_schedules.cpu.vectors import Registers, lanes_of, load, splat, store, value

_SERIAL = 32768  # numbers; waking threads for fewer costs more than the work


def short_conv(shape: ConvShape) -> tirx.PrimFunc:
    """The kernel that `ConvShape` describes."""
    lanes = next(n for n in (16, 8, 4, 2, 1) if shape.channels % n == 0)

    def body(inputs: Inputs, y: Buffer, m: Expr) -> None:
        _each(m, shape, partial(_convolve, inputs, y, lanes))
        with I.If(inputs.step.has_slots_of_rows), I.Then():
            _each(m, shape, partial(_keep_row, inputs, lanes))
        _each(I.cast(inputs.step.sequences, "int64"), shape, partial(_keep, inputs, lanes))

    return shape.function(body)


def _convolve(inputs: Inputs, y: Buffer, lanes: int, row: Expr) -> None:
    """A row of y."""
    shape, step, total = inputs.shape, inputs.step, Registers(1, lanes)
    s = value(step.sequence(row))
    begin, slot = value(step.row_begin(s)), value(step.slot_read(s))
    with I.serial(shape.channels // lanes) as vector:
        total[0] = splat(0.0, lanes)
        for tap in range(shape.taps):
            at = vector * (lanes * shape.taps) + tap
            factor = inputs.weight[at if lanes == 1 else I.ramp(at, shape.taps, lanes)]
            total[0] = total[0] + factor * _input(inputs, row - shape.kept + tap, vector, begin, slot, lanes)
        if inputs.bias is not None:
            total[0] = total[0] + load(inputs.bias, vector * lanes, lanes)
        store(y, (row, vector * lanes), I.cast(shape.finished(total[0]), lanes_of(shape.dtype, lanes)), lanes)


def _keep(inputs: Inputs, lanes: int, s: Expr) -> None:
    """The last inputs of a sequence to its slot; where it is the old one, what is still to be read lies behind."""
    step = inputs.step
    _keep_inputs(inputs, lanes, s, value(step.row_begin(s + 1) - 1), value(step.slot_write(s)))


def _keep_row(inputs: Inputs, lanes: int, row: Expr) -> None:
    """The last inputs up to a row to its slot, if it has one."""
    step = inputs.step
    _keep_inputs(inputs, lanes, value(step.sequence(row)), row, value(step.slot_of_row(row)))


def _keep_inputs(inputs: Inputs, lanes: int, s: Expr, last: Expr, target: Expr) -> None:
    shape, step = inputs.shape, inputs.step
    begin, slot, first = value(step.row_begin(s)), value(step.slot_read(s)), value(last - (shape.kept - 1))
    with I.If(target >= 0), I.Then(), I.serial(shape.kept) as i, I.serial(shape.channels // lanes) as vector:
        number = _input(inputs, first + i, vector, begin, slot, lanes)
        store(inputs.state, (target, i * shape.channels + vector * lanes), number, lanes)


def _input(inputs: Inputs, row: Expr, vector: Expr, begin: Expr, slot: Expr, lanes: int) -> Expr:
    def numbers(buffer: Buffer, at: tuple[Expr, Expr]) -> Expr:
        return load(buffer, at, lanes)

    return inputs.at(row, vector * lanes, begin, slot, numbers, splat(0.0, lanes))


def _each(count: Expr, shape: ConvShape, emit: Callable[[Expr], None]) -> None:
    """emit(i) for `count` rows or sequences, on all threads where there is work for them."""
    with I.If(count * shape.channels <= I.int64(_SERIAL)):
        with I.Then(), I.serial(count) as i:
            emit(i)
        with I.Else(), I.parallel(count) as i:
            emit(i)
