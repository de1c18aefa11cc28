"""Short convolutions for CPUs: vectors of channels, rows in parallel where there are many; see `conv_shape.py`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.conv_shape import ConvShape, Inputs
from tir_schedules.cpu.vectors import Registers, lanes_of, load, splat, store, value

_SERIAL = 32768  # numbers; waking threads for fewer costs more than the work
_ROWS = 32  # of a task


def short_conv(shape: ConvShape) -> tirx.PrimFunc:
    """The kernel that `ConvShape` describes."""
    lanes = next(n for n in (16, 8, 4, 2, 1) if shape.channels % n == 0)

    def body(inputs: Inputs, y: Buffer, m: Expr) -> None:
        with I.If(m * shape.channels <= I.int64(_SERIAL)):
            with I.Then():
                _convolve(inputs, y, lanes, 0, m)
                with I.If(inputs.step.has_slots_of_rows), I.Then(), I.serial(m) as row:
                    _keep_row(inputs, lanes, row)
                with I.serial(inputs.step.sequences) as s:
                    _keep(inputs, lanes, s)
            with I.Else():
                with I.parallel((m + _ROWS - 1) // _ROWS) as block:
                    begin = value(block * _ROWS)
                    _convolve(inputs, y, lanes, begin, value(I.min(m, begin + _ROWS)))
                with I.If(inputs.step.has_slots_of_rows), I.Then(), I.parallel(m) as row:
                    _keep_row(inputs, lanes, row)
                with I.parallel(inputs.step.sequences) as s:
                    _keep(inputs, lanes, s)

    return shape.function(body)


def _convolve(inputs: Inputs, y: Buffer, lanes: int, first: Expr, end: Expr) -> None:
    """Some rows of y. The weights of a vector of channels, which lie apart, are gathered once."""
    shape, step = inputs.shape, inputs.step
    with I.serial(shape.channels // lanes) as vector:
        weights, total = Registers(shape.taps, lanes), Registers(1, lanes)
        for tap in range(shape.taps):
            at = vector * (lanes * shape.taps) + tap
            weights[tap] = inputs.weight[at if lanes == 1 else I.ramp(at, shape.taps, lanes)]
        with I.serial(first, end) as row:
            s = value(step.sequence(row))
            begin, slot = value(step.row_begin(s)), value(step.slot_read(s))
            total[0] = splat(0.0, lanes)
            for tap in range(shape.taps):
                number = _input(inputs, row - shape.kept + tap, vector, begin, slot, lanes)
                total[0] = total[0] + weights[tap] * number
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
