"""Root mean square normalization (Zhang & Sennrich 2019)."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op


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
