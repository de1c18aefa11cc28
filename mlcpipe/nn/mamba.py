"""Mamba (Gu & Dao 2023): a sequence keeps some numbers of each channel, which decay at rates that tokens choose."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.mamba2 import gated
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import columns
from mlcpipe.nn.short_conv import Convolution
from mlcpipe.nn.step_states import StepStates
from tir_schedules.ssm_shape import SsmShape


@dataclass(frozen=True)
class MambaSpec:
    """Static facts of a Mamba block: `inner` channels with `state_size` numbers each.

    rank   of the projection that makes dt
    taps   of the convolution, with a bias if `conv_bias`
    bias   of the first and of the last projection
    norm   of dt, B and C, if there is one
    """

    hidden_size: int
    inner: int
    state_size: int
    rank: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    norm: NormSpec | None = None


class Mamba(nn.Module):
    """out(y * silu(z)): x, z = in(h), and y is the scan of silu(conv(x)), which makes dt, B and C. h is [m, hidden]."""

    def __init__(self, spec: MambaSpec, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self.in_proj = Linear(spec.hidden_size, 2 * spec.inner, spec.bias)
        self.conv1d = Convolution(spec.inner, spec.taps, layer, spec.conv_bias, "silu")
        self.x_proj = Linear(spec.inner, spec.rank + 2 * spec.state_size)
        self.dt_proj = StepSizes(spec.rank, spec.inner)
        self.D = Float32((spec.inner,))
        self.A_log = Float32((spec.inner, spec.state_size))
        self.out_proj = Linear(spec.inner, spec.hidden_size, spec.bias)
        if spec.norm:
            self.dt_layernorm = spec.norm(spec.rank)
            self.b_layernorm, self.c_layernorm = (spec.norm(spec.state_size) for _ in range(2))

    def states(self, model: LanguageModel) -> list[State]:
        """The inputs of the convolution, and the numbers of the channels."""
        shape = self._shape("float32")
        numbers = Part(name="numbers", dtype="float32", shape=(shape.blocks, shape.state_size, shape.lanes))
        scan = State(name=self._state, kind="slot", parts=(numbers,), dtype="float32", layers=(self.layer,))
        return [*self.conv1d.states(model), scan]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.scan"

    def _shape(self, dtype: str) -> SsmShape:
        inner = self.spec.inner
        return SsmShape(inner, 1, self.spec.state_size, 1, inner, dtype, channelwise=True)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; a scan knows the order of tokens without `cos` and `sin`."""
        spec, projected, dtype = self.spec, self.in_proj(x), x.dtype
        x = self.conv1d(columns(projected, 0, spec.inner, dtype), kv)
        z = columns(projected, spec.inner, spec.inner, dtype)
        made, begin, parts = self.x_proj(x), 0, []
        for width in (spec.rank, spec.state_size, spec.state_size):
            parts.append(columns(made, begin, width, dtype))
            begin += width
        if spec.norm:
            norms = self.dt_layernorm, self.b_layernorm, self.c_layernorm
            parts = [norm(part) for norm, part in zip(norms, parts)]
        dt, b, c = parts
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.ssm_scan").ssm_scan(self._shape(dtype))
        inputs = [op.concat([x, b, c], dim=1), self.dt_proj(dt), self.A_log, self.dt_proj.bias, self.D]
        (y,) = kv.update(self._state, func, "ssm_scan", inputs, [x])
        return self.out_proj(gated(y, z))


class StepSizes(Linear):
    """dt [m, rank] -> [m, inner], without the bias f32[inner], which a scan adds."""

    def __init__(self, rank: int, inner: int) -> None:
        super().__init__(rank, inner, quantize=False)
        self.bias = Float32((inner,))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, rank] -> [m, inner]."""
        return op.matmul(x, op.permute_dims(self.weight))
