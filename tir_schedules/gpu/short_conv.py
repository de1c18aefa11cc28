"""Short convolutions for GPUs: an invocation for each number, in two kernels; see `conv_shape.py`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.conv_shape import ConvShape, Inputs
from tir_schedules.gpu.attention.pages import for_each
from tir_schedules.gpu.kernel import keep, local, pin


def short_conv(shape: ConvShape) -> tirx.PrimFunc:
    """The kernels that `ConvShape` describes."""

    def body(inputs: Inputs, y: Buffer, m: Expr) -> None:
        for_each(m * shape.channels, lambda i: _convolve(inputs, y, i))
        for_each(m * shape.channels, lambda i: _keep(inputs, i))

    return shape.function(body)


def _convolve(inputs: Inputs, y: Buffer, i: Expr) -> None:
    """The i-th number of y."""
    shape, step, total = inputs.shape, inputs.step, local(1)
    row, channel = keep(i // shape.channels), keep(i % shape.channels)
    s = pin(step.sequence(row))
    begin, slot = pin(step.row_begin(s)), pin(step.slot_read(s))
    put(total, 0, I.float32(0))
    for tap in range(shape.taps):
        number = inputs.at(row - shape.kept + tap, channel, begin, slot, _load, I.float32(0))
        add(total, 0, inputs.weight[channel * shape.taps + tap] * number)
    if inputs.bias is not None:
        add(total, 0, inputs.bias[channel])
    put(y, (row, channel), shape.finished(total[0]))
    with I.If(step.has_slots_of_rows), I.Then():
        _keep_inputs(inputs, row, channel, s, pin(step.slot_of_row(row)))


def _keep(inputs: Inputs, i: Expr) -> None:
    """Of a sequence's last row: the last inputs to its slot; in place, what is yet to be read lies behind."""
    shape, step = inputs.shape, inputs.step
    row, channel = keep(i // shape.channels), keep(i % shape.channels)
    s = pin(step.sequence(row))
    with I.If(row + 1 == step.row_begin(s + 1)), I.Then():
        _keep_inputs(inputs, row, channel, s, pin(step.slot_write(s)))


def _keep_inputs(inputs: Inputs, row: Expr, channel: Expr, s: Expr, target: Expr) -> None:
    """The last inputs up to a row to a slot."""
    shape, step = inputs.shape, inputs.step
    begin, slot = pin(step.row_begin(s)), pin(step.slot_read(s))
    with I.If(target >= 0), I.Then(), I.serial(0, shape.kept) as at:
        number = inputs.at(row - shape.kept + 1 + at, channel, begin, slot, _load, I.float32(0))
        put(inputs.state, (target, at * shape.channels + channel), number)


def _load(buffer: Buffer, at: tuple[Expr, Expr]) -> Expr:
    return f32(buffer[at])
