"""Gated delta nets (Yang et al. 2024), as in Qwen 3.5: a sequence keeps a matrix for each head, whatever its length.

Those of Kimi Linear (Kimi team 2025) have a decay for each row of the matrix.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.mamba2 import gated
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import columns
from mlcpipe.nn.short_conv import Convolution
from mlcpipe.nn.step_states import StepStates
from tir_schedules.delta_shape import DeltaShape


@dataclass(frozen=True)
class DeltaSpec:
    """Static facts of a gated delta net.

    qkvz, ba   the checkpoint's matrices whose rows are those of q, k, v and the gate z, and of b and a
    channelwise  each row of a head's matrix decays by its own a, whose rows follow those of z
    rank       of z and of such a, which g_b_proj and f_b_proj make of as many numbers; 0: they are not of low rank
    floor      as in DeltaShape
    gate       what z becomes before it multiplies the output
    conv       its convolutions, whose channels are those of q, k and v
    grouped    their rows lie by key head: its q, k, v and z; its b and a
    tiled      value head h reads key head h % key_heads; else value heads after each other share a key head
    beta_scale what the sigmoid of b is multiplied by
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    qkvz: tuple[str, ...] = ("in_proj_qkv", "in_proj_z")
    ba: tuple[str, ...] = ("in_proj_b", "in_proj_a")
    conv: tuple[str, ...] = ("conv1d",)
    grouped: tuple[str, ...] = ()
    tiled: bool = False
    beta_scale: float = 1.0
    channelwise: bool = False
    rank: int = 0
    floor: float = 0.0
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def channels(self) -> int:
        """Numbers of q, k and v in a row."""
        return 2 * self.key_heads * self.key_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Numbers a of a row."""
        return self.value_heads * (self.key_dim if self.channelwise else 1)


class GatedDelta(nn.Module):
    """out(norm(delta(silu(conv(qkv(x))), b(x), a(x))) * gate(z(x))): x [m, hidden] -> [m, hidden].

    `delta` is the rule of `DeltaShape`; the norm is over each head.
    """

    def __init__(self, spec: DeltaSpec, layer: int) -> None:
        self.spec, self.layer, heads = spec, layer, spec.value_heads
        each = heads // spec.key_heads
        rows = (spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim)
        za = (spec.rank or spec.value_size, (spec.rank or spec.decays) if spec.channelwise else 0)
        self.in_proj = _joined(spec, spec.channels + sum(za), spec.qkvz, rows)
        others = heads if spec.channelwise else 2 * heads
        self.in_proj_ba = _joined(spec, others, spec.ba, (each, each), quantize=False)
        if spec.rank:
            self.g_b_proj, self.f_b_proj = (Linear(spec.rank, size) for size in (spec.value_size, spec.decays))
        self.conv1d = Convolution(spec.channels, spec.taps, layer, activation="silu")
        self.conv1d.weight.attrs["sources"] = _weights(spec.conv)
        self.A_log, self.dt_bias = Float32((heads,)), Float32((spec.decays,))
        self.norm = RMSNorm(spec.value_dim, spec.eps)
        self.out_proj = Linear(spec.value_size, spec.hidden_size)

    def states(self, model: LanguageModel) -> list[State]:
        """The last inputs of the convolution, and the matrices."""
        spec, columns = self.spec, self._shape("float32").columns
        matrix = Part(name="matrix", dtype="float32", shape=(spec.value_dim // columns, spec.key_dim, columns))
        own = State(
            name=self._state, kind="slot", parts=(matrix,), copies=spec.value_heads, dtype="float32",
            layers=(self.layer,),
        )  # fmt: skip
        return [*self.conv1d.states(model), own]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.delta"

    def _shape(self, dtype: str, many: bool = False) -> DeltaShape:
        spec = self.spec
        sizes = (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim)
        return DeltaShape(*sizes, dtype, spec.beta_scale, spec.tiled, many, spec.channelwise, spec.floor)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; the order of tokens needs neither `cos` nor `sin`."""
        spec, m = self.spec, x.shape[0]
        qkvz, ba = self.in_proj(x), self.in_proj_ba(x)
        z, begin = qkvz, spec.channels
        if spec.rank:
            z, begin = self.g_b_proj(columns(qkvz, spec.channels, spec.rank, x.dtype)), 0
        if spec.channelwise:
            a = columns(qkvz, spec.channels + (spec.rank or spec.value_size), spec.rank or spec.decays, x.dtype)
            ba = op.concat([ba, self.f_b_proj(a) if spec.rank else a], dim=1)
        qkv = self.conv1d(columns(qkvz, 0, spec.channels, x.dtype), kv)
        kernels = importlib.import_module(f"tir_schedules.{kv.kernels}.gated_delta")
        func = kernels.gated_delta(self._shape(x.dtype, kv.prefill_rows))
        out = Tensor.placeholder((m, spec.value_size), x.dtype)
        (y,) = kv.update(self._state, func, "gated_delta", [qkv, ba, self.A_log, self.dt_bias], [out])
        y = op.reshape(y, (m * spec.value_heads, spec.value_dim))
        y = op.reshape(self.norm(y), (m, spec.value_size))
        return self.out_proj(gated(y, z, begin, spec.gate))


def _joined(spec: DeltaSpec, rows: int, names: Sequence[str], parts: Sequence[int], quantize: bool = True) -> Linear:
    """A matrix of the rows of several, or of one whose `parts` of rows lie by key head."""
    order = _apart(spec.key_heads, parts) if names[0] in spec.grouped else None
    linear = Linear(spec.hidden_size, rows, quantize=quantize, order=order)
    linear.weight.attrs["sources"] = _weights(names)
    return linear


def _weights(modules: Sequence[str]) -> list[list[str]]:
    return [[f"{name}.weight" for name in modules]]


def _apart(groups: int, parts: Sequence[int]) -> NDArray[np.int32]:
    """The rows of all first parts, all second parts and so on, of those that each group has one after another."""
    rows = np.arange(groups * sum(parts), dtype=np.int32).reshape(groups, -1)
    return np.concatenate([part.reshape(-1) for part in np.split(rows, np.cumsum(parts)[:-1], axis=1)])
