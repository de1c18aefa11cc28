"""Lightning attention (Qin et al. 2024): linear attention whose sums decay at a steady rate, as in MiniMax-Text-01."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mamba2 import gated
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.step_states import StepStates
from tir_schedules.ssm_shape import SsmShape

NORM = NormSpec(eps=1e-6)  # of the output, whatever the epsilon of a model's layers


@dataclass(frozen=True)
class LightningSpec:
    """Static facts of a block; `rates` of the layer's heads: a sum of theirs is times exp(-rate) at each token."""

    hidden_size: int
    head_dim: int
    rates: tuple[float, ...]
    act: str


class Lightning(nn.Module):
    """out(norm(y) * sigmoid(gate(x))): q, k, v = act(qkv(x)); S = exp(-rate) S + k^T v, y = q S: x [m, hidden]."""

    def __init__(self, spec: LightningSpec, layer: int) -> None:
        self.spec, self.layer, heads = spec, layer, len(spec.rates)
        self.act, inner = activation(spec.act), heads * spec.head_dim
        # The checkpoint has q, k and v of each head in turn; a scan reads x, B and C: v, k and q of all heads.
        rows = np.arange(3 * inner, dtype=np.int32).reshape(heads, 3, spec.head_dim)
        self.qkv_proj = Linear(spec.hidden_size, 3 * inner, order=rows[:, ::-1].swapaxes(0, 1).reshape(-1))
        self.output_gate = Linear(spec.hidden_size, inner)
        self.norm = NORM(inner)
        self.out_proj = Linear(inner, spec.hidden_size)

    def states(self, model: LanguageModel) -> list[State]:
        """The sums of the heads."""
        shape = self._shape("float32")
        sums = Part(name="sums", dtype="float32", shape=(shape.blocks, shape.state_size, shape.lanes))
        return [State(name=self._state, kind="slot", parts=(sums,), dtype="float32", layers=(self.layer,))]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.lightning"

    def _shape(self, dtype: str) -> SsmShape:
        heads, dim = len(self.spec.rates), self.spec.head_dim
        return SsmShape(heads, dim, dim, heads, 0, dtype, steady=True)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; sums know the order of tokens without `cos` and `sin`."""
        shape = self._shape(x.dtype)
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.ssm_scan").ssm_scan(shape)
        rates = Tensor.from_const(np.log(np.array(self.spec.rates, "float32")))
        out = Tensor.placeholder((x.shape[0], shape.inner), x.dtype)
        (y,) = kv.update(self._state, func, "ssm_scan", [self.act(self.qkv_proj(x)), rates], [out])
        return self.out_proj(gated(self.norm(y), self.output_gate(x), act="sigmoid"))
