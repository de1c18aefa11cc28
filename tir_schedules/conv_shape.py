"""A short convolution over the rows of a step, for every target: its definition, and where its inputs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.op import by_hand
from tir_schedules.step import Step, step_argument

Load = Callable[[Buffer, tuple[Expr, Expr]], Expr]  # the number, or vector, of float32 at an index


@dataclass(frozen=True)
class ConvShape:
    """A depthwise causal convolution of `channels` with `taps` numbers each, over rows of `dtype`.

    short_conv(x [m, channels], weight f32[channels, taps], bias f32[channels] if there is one, step i32[k], state,
    y [m, channels]): in float32 y[i] = act(w[0] x[i - taps + 1] + ... + w[taps - 1] x[i] + bias), added up in this
    order in every step; act is `activation`, or nothing. Then, in place, the state becomes the one for the next step
    of each sequence.

    `state` f32[Z, (taps - 1) * channels]: a slot has the last inputs of a sequence, one token after the other; before
    its first token they are 0.
    """

    channels: int
    taps: int
    dtype: str
    bias: bool = False
    activation: Literal["", "silu"] = ""

    @property
    def kept(self) -> int:
        """Inputs that a slot has of each channel."""
        return self.taps - 1

    def finished(self, total: Expr) -> Expr:
        """y, of the sum of all products and the bias: a number or a vector."""
        return ACTIVATIONS[self.activation](total) if self.activation else total

    def function(self, body: Callable[[Inputs, Buffer, Expr], None]) -> tirx.PrimFunc:
        """`short_conv` of body(inputs, y, m)."""
        m, size, slots = (tirx.Var(name, "int64") for name in ("m", "size", "slots"))
        arguments = {
            "x": Tensor((m, self.channels), self.dtype),
            "weight": Tensor((self.channels, self.taps), "float32", [(self.channels * self.taps, "float32")]),
            **({"bias": Tensor((self.channels,), "float32")} if self.bias else {}),
            "step": step_argument(size),
            "state": Tensor((slots, self.kept * self.channels), "float32"),
            "y": Tensor((m, self.channels), self.dtype),
        }

        def emit(x: Buffer, weight: Buffer, *others: Buffer) -> None:
            *bias, step, state, y = others
            body(Inputs(self, x, weight, bias[0] if bias else None, step, state), y, m)

        facts: dict[str, int | float | str] = {
            "channels": self.channels, "taps": self.taps, "dtype": self.dtype, "bias": self.bias,
            "activation": self.activation,
        }  # fmt: skip
        return by_hand({"short_conv": function("short_conv", arguments, emit)}, "", **facts)["short_conv"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a convolution: its weight as a vector, the rows of a step, and those before that sequences kept."""

    shape: ConvShape
    x: Buffer
    weight: Buffer
    bias: Buffer | None
    step: Step
    state: Buffer

    def at(self, row: Expr, channel: Expr, begin: Expr, slot: Expr, load: Load, zero: Expr) -> Expr:
        """The input of a row, up to taps - 1 before `begin`, the first of its sequence, whose slot was `slot`."""
        before = self.shape.kept + row - begin  # where it is in the slot
        kept = I.if_then_else(slot >= 0, load(self.state, (slot, before * self.shape.channels + channel)), zero)
        return I.if_then_else(row >= begin, load(self.x, (row, channel)), kept)
