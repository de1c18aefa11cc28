"""Short convolutions for CPUs: vectors of channels, rows in parallel where there are many; see `conv_shape.py`."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, function
from tir_schedules.conv_shape import ConvShape, Inputs
from tir_schedules.cpu.vectors import Registers, load, splat, store, value
from tir_schedules.op import by_hand
from tir_schedules.step import Step

_SERIAL = 8192  # numbers; waking threads for fewer costs more than the work


def conv_functions(shape: ConvShape) -> dict[str, tirx.PrimFunc]:
    """`short_conv` and `store_conv`."""
    lanes = next(n for n in (16, 8, 4, 2, 1) if shape.channels % n == 0)
    arguments, m = shape.arguments()

    def convolve(x: Buffer, weight: Buffer, step: Step, state: Buffer, y: Buffer) -> None:
        def of_row(row: Expr) -> None:
            inputs = Inputs.of(shape, x, step, state, step.sequence(row), value)
            total = Registers(1, lanes)
            with I.serial(shape.channels // lanes) as vector:
                channel = vector * lanes
                total[0] = splat(0.0, lanes)
                for tap in range(shape.taps):
                    number = inputs.at(row - shape.kept + tap, channel, of_vector, splat(0.0, lanes))
                    at = channel * shape.taps + tap
                    factor = weight[at if lanes == 1 else I.ramp(at, shape.taps, lanes)]
                    total[0] = total[0] + factor * number
                store(y, (row, channel), total[0], lanes)

        _each(m, shape, of_row)

    def keep_inputs(x: Buffer, step: Step, state: Buffer) -> None:
        def of_sequence(s: Expr) -> None:
            inputs, slot = Inputs.of(shape, x, step, state, s, value), value(step.slot_write(s))
            first = value(step.row_begin(s + 1) - shape.kept)
            # In place: what is still to be read lies behind what is written.
            with I.If(slot >= 0), I.Then(), I.serial(shape.kept) as i, I.serial(shape.channels // lanes) as vector:
                number = inputs.at(first + i, vector * lanes, of_vector, splat(0.0, lanes))
                store(state, (slot, i * shape.channels + vector * lanes), number, lanes)

        _each(I.cast(step.sequences, "int64"), shape, of_sequence)

    def of_vector(buffer: Buffer, at: tuple[Expr, Expr]) -> Expr:
        return load(buffer, at, lanes)

    stored = {name: arguments[name] for name in ("x", "step", "state")}
    functions = {
        "short_conv": function("short_conv", arguments, convolve),
        "store_conv": function("store_conv", stored, keep_inputs),
    }
    return by_hand(functions, "", **shape.facts)


def _each(count: Expr, shape: ConvShape, emit: Callable[[Expr], None]) -> None:
    """emit(i) for `count` rows or sequences, on all threads where there is work for them."""
    with I.If(count * shape.channels <= I.int64(_SERIAL)):
        with I.Then(), I.serial(count) as i:
            emit(i)
        with I.Else(), I.parallel(count) as i:
            emit(i)
