"""The gated short convolution of LFM2 (Liquid AI 2025): of each channel it remembers the last few inputs."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.paged_attention import PagedAttention
from mlcpipe.nn.rows import columns


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
        self.layer = layer
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.conv = Taps(hidden_size, taps, bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias)

    def forward(self, x: Tensor, kv: PagedAttention, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; a convolution knows the order of tokens without `cos` and `sin`."""
        bcx, hidden = self.in_proj(x), int(x.shape[1])
        b, c, x = (columns(bcx, part * hidden, hidden, bcx.dtype) for part in range(3))
        y = kv.convolve(self.layer, op.multiply(b, x), self.conv.weight)
        y = y if self.conv.bias is None else op.add(y, self.conv.bias)
        return self.out_proj(op.multiply(c, y))
