"""Root mean square normalization (Zhang & Sennrich 2019) and layer normalization (Ba et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import definitions


@dataclass(frozen=True)
class NormSpec:
    """What the norms of a model are; called with a size it makes one. `offset` is added to the stored weight.

    `bias` is of layer norms alone, `weight=False` has neither.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    bias: bool = False
    weight: bool = True

    def __call__(self, size: int) -> RMSNorm | LayerNorm:
        """A norm over rows of `size` numbers."""
        if self.kind == "rms":
            return RMSNorm(size, self.eps, self.offset, self.weight)
        return LayerNorm(size, self.eps, self.bias, self.offset, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last axis, computed in float32.

    `offset` (1.0 for Gemma) is added to the weight when the checkpoint is converted. `weight=False`: it is 1.
    """

    def __init__(self, size: int, eps: float, offset: float = 0.0, weight: bool = True) -> None:
        self.size, self.eps = size, eps
        self.weight = norm_weight(size, offset) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return rms_norm(x, self.eps, self.weight)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * (offset + weight) + bias over the columns of [m, size], in float32.

    `weight=False`: without weight and bias.
    """

    def __init__(self, size: int, eps: float, bias: bool = True, offset: float = 0.0, weight: bool = True) -> None:
        self.size, self.eps = size, eps
        self.weight = norm_weight(size, offset) if weight else None
        self.bias = nn.Parameter((size,)) if bias and weight else None

    def forward(self, x: Tensor) -> Tensor:
        """x [m, size] -> the same shape."""
        return layer_norm(x, self.eps, self.weight, self.bias)

    def of_sum(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a and b [m, size] -> a + b, and its norm."""
        func, vectors = _layer_norm(a, self.eps, self.weight, self.bias, residual=True)
        total, y = op.tensor_ir_op(func, "add_layer_norm", [a, b, *vectors], [_like(a), _like(a)])
        return total, y


def rms_norm(x: Tensor, eps: float, weight: Tensor | None) -> Tensor:
    """x [..., size] -> the same shape, the formula of `RMSNorm`."""
    return op.rms_norm(x, _ones(x) if weight is None else weight, axes=-1, epsilon=eps)


def layer_norm(x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x [m, size] -> the same shape, the formula of `LayerNorm`."""
    func, vectors = _layer_norm(x, eps, weight, bias, residual=False)
    return op.tensor_ir_op(func, "layer_norm", [x, *vectors], _like(x))


def _layer_norm(
    x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None, *, residual: bool
) -> tuple[tirx.PrimFunc, list[Tensor]]:
    """The kernel, and its vectors."""
    vectors = [_ones(x) if weight is None else weight, *([] if bias is None else [bias])]
    size, dtype = int(x.shape[-1]), vectors[0].dtype
    return definitions.layer_norm(size, eps, x.dtype, dtype, biased=bias is not None, residual=residual), vectors


def norm_weight(size: int, offset: float) -> nn.Parameter:
    """The weight of a norm; `offset` is added to it when the checkpoint is converted."""
    weight = nn.Parameter((size,))
    if offset:
        weight.attrs["add"] = offset
    return weight


def _ones(x: Tensor) -> Tensor:
    return Tensor.from_const(np.ones(int(x.shape[-1]), x.dtype))


def _like(x: Tensor) -> Tensor:
    return Tensor.placeholder(x.shape, x.dtype)
