"""A short convolution over the rows of a step, whatever the target: what it computes, and where its inputs are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor
from tir_schedules.step import Step, step_argument

Load = Callable[[Buffer, tuple[Expr, Expr]], Expr]  # the number, or vector, of float32 at an index


@dataclass(frozen=True)
class ConvShape:
    """A depthwise causal convolution of `channels` with `taps` numbers each, over rows of `dtype`.

    short_conv(x [m, channels], weight f32[channels, taps], step i32[k], state, y [m, channels]): in float32
    y[i] = w[0] x[i - taps + 1] + ... + w[taps - 1] x[i], added up in this order whatever else is in the step.
    store_conv(x, step, state): afterwards, in place, what the next step of each sequence needs.

    `state` f32[Z, (taps - 1) * channels]: a slot has the last inputs of a sequence, one token after the other; before
    its first token they are 0.
    """

    channels: int
    taps: int
    dtype: str

    @property
    def kept(self) -> int:
        """Inputs that a slot has of each channel."""
        return self.taps - 1

    @property
    def facts(self) -> dict[str, int | float | str]:
        """What the tags of both functions say of it."""
        return {"channels": self.channels, "taps": self.taps, "dtype": self.dtype}

    def arguments(self) -> tuple[dict[str, Tensor], Expr]:
        """The arguments of `short_conv`, and m. The weight is a vector."""
        m, size, slots = (tirx.Var(name, "int64") for name in ("m", "size", "slots"))
        numbers = self.channels * self.taps
        return {
            "x": Tensor((m, self.channels), self.dtype),
            "weight": Tensor((self.channels, self.taps), "float32", [(numbers, "float32")]),
            "step": step_argument(size),
            "state": Tensor((slots, self.kept * self.channels), "float32"),
            "y": Tensor((m, self.channels), self.dtype),
        }, m


@dataclass(frozen=True)
class Inputs:
    """The inputs of one sequence: `begin` is its first row in x, `slot` has those before, -1 if there are none."""

    shape: ConvShape
    x: Buffer
    state: Buffer
    begin: Expr
    slot: Expr

    @classmethod
    def of(
        cls, shape: ConvShape, x: Buffer, step: Step, state: Buffer, s: Expr, keep: Callable[[Expr], Expr]
    ) -> Inputs:
        """Those of sequence s."""
        return cls(shape, x, state, keep(step.row_begin(s)), keep(step.slot_read(s)))

    def at(self, row: Expr, channel: Expr, load: Load, zero: Expr) -> Expr:
        """The input of `row`, which may be up to taps - 1 before the first."""
        before = self.shape.kept + row - self.begin  # where it is in the slot
        kept = I.if_then_else(
            self.slot >= 0, load(self.state, (self.slot, before * self.shape.channels + channel)), zero
        )
        return I.if_then_else(row >= self.begin, load(self.x, (row, channel)), kept)
