"""Short convolutions: a sequence keeps the last few inputs of each channel; with the gated mixer of LFM2."""

from __future__ import annotations

import importlib
from typing import Literal

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.rows import columns
from mlcpipe.nn.step_states import StepStates
from tir_schedules.conv_shape import ConvShape


class Convolution(nn.Module):
    """act(conv(x) + bias): x [m, channels] -> [m, channels], causal and depthwise with `taps` taps, in float32.

    A sequence keeps its last taps - 1 inputs. weight f32[channels, taps], bias f32[channels] if there is one.
    """

    def __init__(
        self, channels: int, taps: int, layer: int, bias: bool = False, activation: Literal["", "silu"] = ""
    ) -> None:
        self.channels, self.taps, self.layer, self.activation = channels, taps, layer, activation
        self.weight = Float32((channels, taps))
        self.bias = Float32((channels,)) if bias else None

    def states(self, model: LanguageModel) -> list[State]:
        """The last inputs."""
        inputs = Part(name="inputs", dtype="float32", shape=(self.taps - 1, self.channels))
        return [State(name=self._state, kind="slot", parts=(inputs,), dtype="float32", layers=(self.layer,))]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.conv"

    def forward(self, x: Tensor, kv: StepStates) -> Tensor:
        """x [m, channels] -> the same shape; the state becomes what it is after the step."""
        shape = ConvShape(self.channels, self.taps, x.dtype, self.bias is not None, self.activation)
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.short_conv").short_conv(shape)
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        (y,) = kv.update(self._state, func, "short_conv", [x, *weights], [x])
        return y


class ShortConv(nn.Module):
    """out(C * conv(B * x)) with B, C, x = in(h) (LFM2, Liquid AI 2025): h [m, hidden] -> [m, hidden]."""

    def __init__(self, hidden_size: int, taps: int, layer: int, bias: bool = False) -> None:
        self.hidden_size = hidden_size
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.conv = Convolution(hidden_size, taps, layer, bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; a convolution knows the order of tokens without `cos` and `sin`."""
        bcx, hidden = self.in_proj(x), self.hidden_size
        b, c, x = (columns(bcx, part * hidden, hidden, bcx.dtype) for part in range(3))
        return self.out_proj(op.multiply(c, self.conv(op.multiply(b, x), kv)))
