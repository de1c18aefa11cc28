"""The gated short convolution of LFM2 (Liquid AI 2025): a sequence keeps the last few inputs of each channel."""

from __future__ import annotations

import importlib

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.rows import columns
from mlcpipe.nn.step_states import StepStates
from tir_schedules.conv_shape import ConvShape


class Taps(nn.Module):
    """The numbers of a depthwise convolution: weight f32[channels, taps], bias [channels] if there is one."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        self.weight = Float32((channels, taps))
        self.bias = nn.Parameter((channels,)) if bias else None


class ShortConv(nn.Module):
    """out(C * conv(B * x)) with B, C, x = in(h): h [m, hidden] -> [m, hidden].

    conv is causal and depthwise with `taps` taps; a sequence keeps its last taps - 1 inputs B * x.
    """

    def __init__(self, hidden_size: int, taps: int, layer: int, bias: bool = False) -> None:
        self.hidden_size, self.taps, self.layer = hidden_size, taps, layer
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.conv = Taps(hidden_size, taps, bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias)

    def states(self, model: LanguageModel) -> list[State]:
        """The states of the layer."""
        inputs = Part(name="inputs", dtype="float32", shape=(self.taps - 1, self.hidden_size))
        return [State(name=self._state, kind="slot", parts=(inputs,), dtype="float32", layers=(self.layer,))]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.conv"

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; a convolution knows the order of tokens without `cos` and `sin`."""
        bcx, hidden = self.in_proj(x), self.hidden_size
        b, c, x = (columns(bcx, part * hidden, hidden, bcx.dtype) for part in range(3))
        y = self._convolve(op.multiply(b, x), kv)
        y = y if self.conv.bias is None else op.add(y, self.conv.bias)
        return self.out_proj(op.multiply(c, y))

    def _convolve(self, x: Tensor, kv: StepStates) -> Tensor:
        """conv of x [m, hidden]; the state becomes what it is after the step."""
        kernels = importlib.import_module(f"tir_schedules.{kv.kernels}.short_conv")
        func = kernels.short_conv(ConvShape(self.hidden_size, self.taps, x.dtype))
        own = kv.place(self._state)
        arguments = [x, self.conv.weight, kv.step, kv.tensors[own]]
        outputs = [Tensor.placeholder(one.shape, one.dtype) for one in (kv.tensors[own], x)]
        kv.tensors[own], y = op.tensor_ir_inplace_op(func, "short_conv", arguments, [3, -1], outputs)
        return y
