"""Short convolutions for GPUs: an invocation for each number; see `conv_shape.py`."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, function, put
from tir_schedules.conv_shape import ConvShape, Inputs
from tir_schedules.gpu.attention.pages import for_each
from tir_schedules.gpu.kernel import keep, local, pin
from tir_schedules.op import by_hand
from tir_schedules.step import Step


def conv_functions(shape: ConvShape) -> dict[str, tirx.PrimFunc]:
    """`short_conv` and `store_conv`."""
    channels, (arguments, m) = shape.channels, shape.arguments()

    def convolve(x: Buffer, weight: Buffer, step: Step, state: Buffer, y: Buffer) -> None:
        def number(i: Expr) -> None:
            row, channel = keep(i // channels), keep(i % channels)
            inputs, total = Inputs.of(shape, x, step, state, pin(step.sequence(row)), pin), local(1)
            put(total, 0, I.float32(0))
            for tap in range(shape.taps):
                one = inputs.at(row - shape.kept + tap, channel, _load, I.float32(0))
                add(total, 0, weight[channel * shape.taps + tap] * one)
            put(y, (row, channel), total[0])

        for_each(m * channels, number)

    def keep_inputs(x: Buffer, step: Step, state: Buffer) -> None:
        def number(i: Expr) -> None:
            """What the last row of a sequence has to keep of a channel."""
            row, channel = keep(i // channels), keep(i % channels)
            s = pin(step.sequence(row))
            inputs, slot = Inputs.of(shape, x, step, state, s, pin), pin(step.slot_write(s))
            # In place: what is still to be read lies behind what is written.
            with I.If(I.And(slot >= 0, row + 1 == step.row_begin(s + 1))), I.Then(), I.serial(0, shape.kept) as at:
                one = inputs.at(row - shape.kept + 1 + at, channel, _load, I.float32(0))
                put(state, (slot, at * channels + channel), one)

        for_each(m * channels, number)

    stored = {name: arguments[name] for name in ("x", "step", "state")}
    functions = {
        "short_conv": function("short_conv", arguments, convolve),
        "store_conv": function("store_conv", stored, keep_inputs),
    }
    return by_hand(functions, "", **shape.facts)


def _load(buffer: Buffer, at: tuple[Expr, Expr]) -> Expr:
    return f32(buffer[at])
