"""RWKV-7 (Peng et al. 2025): a sequence keeps a matrix for each head, which each token decays, corrects and adds to.

Both blocks of a layer mix a row with the one before it. Formulas as in https://github.com/BlinkDL/RWKV-LM, RWKV-v7.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.norm import NormSpec, layer_norm
from mlcpipe.nn.rows import columns, scaled
from mlcpipe.nn.step_states import StepStates
from tir_schedules.conv_shape import ConvShape
from tir_schedules.rwkv_shape import RwkvShape

_DECAY = -(np.e**-0.5)  # the logarithm of the smallest
_LEAST = 1e-12  # of lengths that divide


@dataclass(frozen=True)
class RwkvSpec:
    """Static facts of a layer; ranks are those of what makes the decays w, a, v and the gate g."""

    hidden_size: int
    heads: int
    width: int
    ranks: tuple[int, int, int, int]
    norm: NormSpec

    @property
    def dim(self) -> int:
        """Keys and values of a head."""
        return self.hidden_size // self.heads


class TokenShift(nn.Module):
    """x_(t-1) - x_t: x [m, channels] -> the same shape; a sequence keeps its last row, 0 before its first."""

    def __init__(self, channels: int, name: str, layer: int) -> None:
        self.channels, self.state, self.layer = channels, f"layers.{layer}.{name}", layer

    def states(self, model: LanguageModel) -> list[State]:
        """The last row."""
        row = Part(name="row", dtype="float32", shape=(1, self.channels))
        return [State(name=self.state, kind="slot", parts=(row,), dtype="float32", layers=(self.layer,))]

    def forward(self, x: Tensor, kv: StepStates) -> Tensor:
        """x [m, channels] -> the same shape: a convolution with two taps."""
        shape = ConvShape(self.channels, 2, x.dtype, False, "")
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.short_conv").short_conv(shape)
        taps = Tensor.from_const(np.tile(np.array([1, -1], np.float32), (self.channels, 1)))
        (y,) = kv.update(self.state, func, "short_conv", [x, taps], [x])
        return y


class LowRank(nn.Module):
    """B act(A x) + bias, in float32: x [m, hidden] -> [m, hidden]."""

    def __init__(self, size: int, rank: int, act: str = "", bias: bool = True) -> None:
        self.act = act
        self.a, self.b = Linear(size, rank, quantize=False), Linear(rank, size, bias, quantize=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> f32[m, hidden]."""
        y = self.a(x)
        y = {"tanh": op.tanh, "sigmoid": op.sigmoid}[self.act](y) if self.act else y
        return _f32(self.b(y))


class GroupNorm(nn.Module):
    """Layer norms of each head, with a weight and a bias for each channel: f32[m, hidden] -> the same shape."""

    def __init__(self, spec: RwkvSpec) -> None:
        self.spec = spec
        self.weight, self.bias = Float32((spec.hidden_size,)), Float32((spec.hidden_size,))

    def forward(self, x: Tensor) -> Tensor:
        """f32[m, hidden] -> the same shape; the epsilon is that of other norms for each channel of a head."""
        of, m = self.spec, x.shape[0]
        rows = layer_norm(op.reshape(x, (m * of.heads, of.dim)), of.dim * of.norm.eps, None, None)
        return op.add(op.multiply(op.reshape(rows, (m, of.hidden_size)), self.weight), self.bias)


class TimeMix(nn.Module):
    """The block that mixes tokens; `values` of the first layer are a part of those of all others."""

    def __init__(self, spec: RwkvSpec, layer: int) -> None:
        self.spec, self.layer, size = spec, layer, spec.hidden_size
        self.x_r, self.x_w, self.x_k, self.x_v, self.x_a, self.x_g = (Float32((size,)) for _ in range(6))
        self.k_k, self.k_a, self.r_k = Float32((size,)), Float32((size,)), Float32((spec.heads, spec.dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(size, size) for _ in range(4))
        of_w, of_a, of_v, of_g = spec.ranks
        self.w_lora, self.a_lora = LowRank(size, of_w, "tanh"), LowRank(size, of_a)
        self.v_lora = LowRank(size, of_v) if layer else None
        self.g_lora = LowRank(size, of_g, "sigmoid", bias=False)
        self.g_norm = GroupNorm(spec)
        self.shift = TokenShift(size, "time_shift", layer)

    def states(self, model: LanguageModel) -> list[State]:
        """The last row, and the matrices of the heads."""
        of = self.spec
        matrix = Part(name="matrix", dtype="float32", shape=(of.dim, of.dim))
        own = State(
            name=self._state, kind="slot", parts=(matrix,), copies=of.heads, dtype="float32", layers=(self.layer,)
        )
        return [*self.shift.states(model), own]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.rwkv"

    def forward(self, x: Tensor, kv: StepStates, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [m, hidden], the first layer's values -> [m, hidden], and the values f32[m, hidden]."""
        delta = self.shift(x, kv)
        r, w, k, v, a, g = (mixed(x, delta, getattr(self, f"x_{name}")) for name in "rwkvag")
        values = _f32(self.v_proj(v))
        if self.v_lora is not None:
            assert first is not None
            values = op.add(values, op.multiply(op.subtract(_f32(first), values), op.sigmoid(self.v_lora(v))))
        w = op.exp(scaled(op.sigmoid(self.w_lora(w)), _DECAY))
        r, k, a, g = _f32(self.r_proj(r)), _f32(self.k_proj(k)), op.sigmoid(self.a_lora(a)), self.g_lora(g)
        removed = self._unit(op.multiply(k, self.k_k))
        k = op.add(k, op.multiply(op.multiply(k, self.k_a), op.subtract(a, Tensor.from_scalar(1.0, "float32"))))
        inputs = [r, w, k, values, scaled(removed, -1.0), op.multiply(removed, a)]
        shape = RwkvShape(self.spec.heads, self.spec.dim)
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.rwkv").rwkv(shape)
        (y,) = kv.update(self._state, func, "rwkv", inputs, [r])
        bonus = op.sum(op.multiply(self._heads(op.multiply(r, k)), self.r_k), axis=-1, keepdims=True)
        y = op.multiply(op.add(self.g_norm(y), self._of_heads(bonus, values)), g)
        return self.o_proj(y if x.dtype == "float32" else op.astype(y, x.dtype)), values

    def _heads(self, x: Tensor) -> Tensor:
        return op.reshape(x, (x.shape[0], self.spec.heads, self.spec.dim))

    def _of_heads(self, factors: Tensor, x: Tensor) -> Tensor:
        """x [m, hidden] times a factor [m, heads, 1] of each head."""
        return op.reshape(op.multiply(factors, self._heads(x)), (x.shape[0], self.spec.hidden_size))

    def _unit(self, x: Tensor) -> Tensor:
        """x f32[m, hidden], each head of length 1."""
        heads = self._heads(x)
        length = op.sqrt(op.sum(op.multiply(heads, heads), axis=-1, keepdims=True))
        unit = op.divide(heads, op.maximum(length, Tensor.from_scalar(_LEAST, "float32")))
        return op.reshape(unit, (x.shape[0], self.spec.hidden_size))


class ChannelMix(nn.Module):
    """value(max(0, key(x + (x_(t-1) - x) x_k))^2): x [m, hidden] -> [m, hidden]."""

    def __init__(self, spec: RwkvSpec, layer: int) -> None:
        self.x_k = Float32((spec.hidden_size,))
        self.key, self.value = Linear(spec.hidden_size, spec.width), Linear(spec.width, spec.hidden_size)
        self.shift = TokenShift(spec.hidden_size, "channel_shift", layer)

    def forward(self, x: Tensor, kv: StepStates) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.value(op.square(op.relu(self.key(mixed(x, self.shift(x, kv), self.x_k)))))


class RwkvLayer(nn.Module):
    """x += attn(attn_norm(x)); x += ffn(ffn_norm(x)). From the first layer on its values are beside x."""

    def __init__(self, spec: RwkvSpec, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self.attn_norm, self.attn = spec.norm(spec.hidden_size), TimeMix(spec, layer)
        self.ffn_norm, self.ffn = spec.norm(spec.hidden_size), ChannelMix(spec, layer)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] in the first layer, else [m, 2 hidden] -> [m, 2 hidden]."""
        size, first = self.spec.hidden_size, None
        if self.layer:
            x, first = (columns(x, part * size, size, x.dtype) for part in range(2))
        y, values = self.attn(self.attn_norm(x), kv, first)
        x = op.add(x, y)
        x = op.add(x, self.ffn(self.ffn_norm(x), kv))
        if first is None:
            first = values if x.dtype == "float32" else op.astype(values, x.dtype)
        return op.concat([x, first], dim=1)


class FirstValues(nn.Module):
    """Two streams after the first layer: hidden states, and the first layer's values."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def begin(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> x."""
        return x

    def end(self, x: Tensor) -> Tensor:
        """x [m, 2 hidden] -> [m, hidden]."""
        return columns(x, 0, self.hidden_size, x.dtype)


def mixed(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    """x + delta * weight, in float32: x and delta [m, n], weight f32[n] -> [m, n]."""

    def sums(x: te.Tensor, delta: te.Tensor, weight: te.Tensor) -> te.Tensor:
        return te.compute(
            x.shape,
            lambda i, j: (x[i, j].astype("float32") + delta[i, j].astype("float32") * weight[j]).astype(x.dtype),
            name="mixed",
        )

    return op.tensor_expr_op(sums, "mixed", [x, delta, weight])


def _f32(x: Tensor) -> Tensor:
    return x if x.dtype == "float32" else op.astype(x, "float32")
