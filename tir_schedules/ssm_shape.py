"""The scan of state spaces (Mamba, Gu & Dao 2023; Mamba-2, Dao & Gu 2024), for every target: its definition.

The recurrence itself is computed, token after token, and not in products of chunks: a step of one token and a prompt
have the same bits, wherever prompts are cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.op import by_hand
from tir_schedules.step import Step, step_argument

_LANES = 16


@dataclass(frozen=True)
class SsmShape:
    """`heads` of `head_dim` channels, whose states have `state_size` numbers for each; B and C of `groups` of heads.

    ssm_scan(xbc [m, channels], projected [m, width], a_log, dt_bias, skip f32[heads], step i32[k], state, y): a row of
    xbc has x [heads, head_dim], B and C [groups, state_size]; the last `heads` columns of projected are dt. In float32

        dt = softplus(dt + dt_bias); S = exp(-exp(a_log) dt) S + dt x B; y = S C + skip x

    for each channel of a head; with `channelwise` (Mamba) a head has one channel and a_log f32[heads, state_size] is of
    each number of its state. y [m, heads * head_dim]. Then, in place, the state becomes the one for the next step of
    each sequence. With `steady` (lightning attention, Qin et al. 2024) dt is 1 and skip 0, and there is no `projected`,
    `dt_bias` or `skip`.

    `state` f32[Z, heads * head_dim * state_size]: a slot has blocks of `lanes` channels, [state_size, lanes] each;
    before a sequence's first token they are 0.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    width: int
    dtype: str
    channelwise: bool = False
    steady: bool = False

    @property
    def inner(self) -> int:
        """Channels of x and y."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns of xbc."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def lanes(self) -> int:
        """Channels of a block; they are of one head, or each is one."""
        return math.gcd(self.heads if self.channelwise else self.head_dim, _LANES)

    @property
    def blocks(self) -> int:
        return self.inner // self.lanes

    def head(self, block: Expr) -> Expr:
        """The first head of a block."""
        return block * self.lanes // self.head_dim

    def b_column(self, block: Expr) -> Expr:
        """The first column of B for a block; C follows after `groups * state_size` columns."""
        return self.inner + self.head(block) // (self.heads // self.groups) * self.state_size

    def function(self, body: Callable[[Scan], None]) -> tirx.PrimFunc:
        """`ssm_scan` of body."""
        m, size, slots = (tirx.Var(name, "int64") for name in ("m", "size", "slots"))
        rates = (self.heads, self.state_size) if self.channelwise else (self.heads,)
        stepped = {} if self.steady else {"projected": Tensor((m, self.width), self.dtype)}
        vectors = () if self.steady else ("dt_bias", "skip")
        arguments = {
            "xbc": Tensor((m, self.channels), self.dtype),
            **stepped,
            "a_log": Tensor(rates, "float32", [(math.prod(rates), "float32")]),
            **{name: Tensor((self.heads,), "float32") for name in vectors},
            "step": step_argument(size),
            "state": Tensor((slots, self.inner * self.state_size), "float32"),
            "y": Tensor((m, self.inner), self.dtype),
        }
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        func = function("ssm_scan", arguments, lambda *buffers: body(Scan(self, m, **dict(zip(arguments, buffers)))))
        return by_hand({"ssm_scan": func}, "", **facts)["ssm_scan"]


@dataclass(frozen=True)
class Scan:
    """The arguments of a scan of m rows; a_log as a vector."""

    shape: SsmShape
    m: Expr
    xbc: Buffer
    a_log: Buffer
    step: Step
    state: Buffer
    y: Buffer
    projected: Buffer = None
    dt_bias: Buffer = None
    skip: Buffer = None
