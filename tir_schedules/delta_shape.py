"""The gated delta rule over the rows of a step, for every target: its definition, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import softplus
from tir_schedules.builder import Buffer, Expr, Tensor, f32, function
from tir_schedules.op import by_hand
from tir_schedules.step import Step, step_argument

EPS = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class DeltaShape:
    """The gated delta rule (Yang et al. 2024) of `value_heads` heads with a state S [key_dim, value_dim] each.

    gated_delta(qkv [m, channels], ba [m, value_heads + decays], a_log f32[value_heads], dt_bias f32[decays],
    step i32[k], state, y [m, value_heads * value_dim]): for each row of a sequence, in float32,
    S *= exp(g), d = beta (v - k S), S += k^T d, y = q S with g = -exp(a_log) softplus(a + dt_bias),
    beta = `beta_scale` sigmoid(b), q and k of length 1, and q divided by sqrt(key_dim). A row of qkv has all q, all k
    and all v, one of ba all b and all a. Then, in place, the state becomes the one for the next step.

    `state` f32[Z, value_heads * key_dim * value_dim]: of each head S as [value_dim / columns, key_dim, columns], so
    that some columns are one piece of memory. Before a sequence's first token it is 0.
    `tiled`: head h has the q and k of head h % key_heads, else value_heads / key_heads heads in a row share them.
    `channelwise` (Kimi Delta Attention, Kimi team 2025): ba has an a, and dt_bias a number, for each head and row of S,
    [value_heads, key_dim], and each row decays by its own g; with a `floor` below 0, g = floor sigmoid(exp(a_log)
    (a + dt_bias)).
    `many`: rows are of prompts, which a kernel may compute some at a time.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    beta_scale: float = 1.0
    tiled: bool = False
    many: bool = False
    channelwise: bool = False
    floor: float = 0.0

    @property
    def decays(self) -> int:
        """Numbers a of a row."""
        return self.value_heads * (self.key_dim if self.channelwise else 1)

    @property
    def channels(self) -> int:
        """Numbers of q, k and v in a row."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Columns of a state that lie together; with 128 rows they are 16 KiB."""
        return next(n for n in (32, 16, 8, 4, 2, 1) if self.value_dim % n == 0)

    @property
    def state_size(self) -> int:
        """Numbers of a head's state."""
        return self.key_dim * self.value_dim

    def function(self, body: Callable[[Inputs, Buffer, Expr], None]) -> tirx.PrimFunc:
        """`gated_delta` of body(inputs, y, m)."""
        m, size, slots = (tirx.Var(name, "int64") for name in ("m", "size", "slots"))
        heads = self.value_heads
        arguments = {
            "qkv": Tensor((m, self.channels), self.dtype),
            "ba": Tensor((m, heads + self.decays), self.dtype),
            "a_log": Tensor((heads,), "float32"),
            "dt_bias": Tensor((self.decays,), "float32"),
            "step": step_argument(size),
            "state": Tensor((slots, heads * self.state_size), "float32"),
            "y": Tensor((m, heads * self.value_dim), self.dtype),
        }

        def emit(*buffers: Buffer) -> None:
            *inputs, y = buffers
            body(Inputs(self, *inputs), y, m)

        facts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "many"}
        facts["rows"] = "many" if self.many else "few"
        return by_hand({"gated_delta": function("gated_delta", arguments, emit)}, "", **facts)["gated_delta"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of the rule: where the numbers of a row and a head are, and its two gates."""

    shape: DeltaShape
    qkv: Buffer
    ba: Buffer
    a_log: Buffer
    dt_bias: Buffer
    step: Step
    state: Buffer

    def q(self, head: Expr) -> Expr:
        """The first column of a head's query."""
        shape = self.shape
        group = shape.value_heads // shape.key_heads
        return (head % shape.key_heads if shape.tiled else head // group) * shape.key_dim

    def k(self, head: Expr) -> Expr:
        """The first column of a head's key."""
        return self.q(head) + self.shape.key_heads * self.shape.key_dim

    def v(self, head: Expr) -> Expr:
        """The first column of a head's value."""
        return 2 * self.shape.key_heads * self.shape.key_dim + head * self.shape.value_dim

    def a(self, head: Expr) -> Expr:
        """Where the biases of a head's a begin; its first column in `ba` is `value_heads` after it."""
        return head * self.shape.key_dim if self.shape.channelwise else head

    def log_decay(self, row: Expr, head: Expr, channel: Expr = 0) -> Expr:
        """g of a row and head, or of one of its channels; at most 0."""
        at = self.a(head) + channel
        return self.log_decay_of(f32(self.ba[row, self.shape.value_heads + at]) + self.dt_bias[at], head)

    def log_decay_of(self, x: Expr, head: Expr, splat: Callable[[Any], Expr] = I.float32) -> Expr:
        """g of a + dt_bias, a number or a vector as `splat` makes."""
        rate, x = splat(I.bind(I.exp(self.a_log[head]))), I.bind(x)
        if self.shape.floor:
            return splat(self.shape.floor) / (splat(1.0) + I.exp(splat(0.0) - rate * x))
        return splat(0.0) - rate * softplus(x, splat, I.bind)

    def beta(self, row: Expr, head: Expr) -> Expr:
        """How much of a row's correction the state takes."""
        b = f32(self.ba[row, head])
        return I.float32(self.shape.beta_scale) / (I.float32(1) + I.exp(I.float32(0) - b))

    @property
    def q_scale(self) -> float:
        """What queries of length 1 are multiplied by."""
        return float(self.shape.key_dim**-0.5)
