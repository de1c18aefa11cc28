"""Root mean square normalization (Zhang & Sennrich 2019) and layer normalization (Ba et al. 2016)."""

from __future__ import annotations

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import definitions


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, computed in float32.

    `offset` (1.0 for Gemma) is added to the weight when the checkpoint is converted.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        self.size, self.eps = size, eps
        self.weight = nn.Parameter((size,))
        if offset:
            self.weight.attrs["add"] = offset

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return op.rms_norm(x, self.weight, axes=-1, epsilon=self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the columns of [m, size], computed in float32."""

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        self.size, self.eps = size, eps
        self.weight = nn.Parameter((size,))
        self.bias = nn.Parameter((size,)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [m, size] -> the same shape."""
        return op.tensor_ir_op(self._kernel(x, False), "layer_norm", [x, *self._vectors()], _like(x))

    def of_sum(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a and b [m, size] -> a + b, and its norm."""
        outputs = [_like(a), _like(a)]
        total, y = op.tensor_ir_op(self._kernel(a, True), "add_layer_norm", [a, b, *self._vectors()], outputs)
        return total, y

    def _vectors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def _kernel(self, x: Tensor, residual: bool) -> tirx.PrimFunc:
        biased = self.bias is not None
        return definitions.layer_norm(self.size, self.eps, x.dtype, self.weight.dtype, biased=biased, residual=residual)


def _like(x: Tensor) -> Tensor:
    return Tensor.placeholder(x.shape, x.dtype)
