"""The recurrence of RWKV-7 (Peng et al. 2025, section 4) over the rows of a step, for every target: its definition.

It is computed token after token: a step of one token and a prompt have the same bits, wherever prompts are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from tir_schedules.builder import Buffer, Tensor, function
from tir_schedules.op import by_hand
from tir_schedules.step import Step, step_argument

VECTORS = ("r", "w", "k", "v", "a", "b")


@dataclass(frozen=True)
class RwkvShape:
    """`heads` of `dim` keys and as many values, with a state S [keys, values] each.

    rwkv(r, w, k, v, a, b f32[m, heads * dim], step i32[k], state, y f32[m, heads * dim]): for each row of a sequence
    and each head

        c = a S; S = diag(w) S + b^T c + k^T v; y = r S

    Then, in place, the state becomes the one for the next step of each sequence.

    `state` f32[Z, heads * dim * dim]: the S of each head by rows; before a sequence's first token they are 0.
    """

    heads: int
    dim: int

    @property
    def inner(self) -> int:
        """Columns of the inputs and of y."""
        return self.heads * self.dim

    @property
    def state_size(self) -> int:
        """Numbers of a head's state."""
        return self.dim * self.dim

    def function(self, body: Callable[[Rows], None]) -> tirx.PrimFunc:
        """`rwkv` of body."""
        m, size, slots = (tirx.Var(name, "int64") for name in ("m", "size", "slots"))
        arguments = {
            **{name: Tensor((m, self.inner), "float32") for name in VECTORS},
            "step": step_argument(size),
            "state": Tensor((slots, self.heads * self.state_size), "float32"),
            "y": Tensor((m, self.inner), "float32"),
        }
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        func = function("rwkv", arguments, lambda *buffers: body(Rows(self, m, **dict(zip(arguments, buffers)))))
        return by_hand({"rwkv": func}, "", **facts)["rwkv"]


@dataclass(frozen=True)
class Rows:
    """The arguments, of m rows."""

    shape: RwkvShape
    m: tirx.Expr
    r: Buffer
    w: Buffer
    k: Buffer
    v: Buffer
    a: Buffer
    b: Buffer
    step: Step
    state: Buffer
    y: Buffer
