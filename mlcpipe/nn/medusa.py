"""Medusa heads (Cai et al. 2024, section 2.1.1): head i guesses the token i + 2 places after a row's own.

p_i = softmax(W_i (x + SiLU(V_i x + b_i))), where x is the row that the model computes its own logits from.
"""

from __future__ import annotations

from fractions import Fraction

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Linear


class ResidualBlock(nn.Module):
    """x + SiLU(V x + b) for x [m, hidden]."""

    def __init__(self, hidden_size: int) -> None:
        self.linear = Linear(hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return op.add(x, op.silu(self.linear(x)))


def medusa_head(hidden_size: int, vocab_size: int, blocks: int) -> nn.ModuleList:
    """A head: x [m, hidden] -> logits [m, vocab]. A step without drafts reads none of its weights."""
    made = [ResidualBlock(hidden_size) for _ in range(blocks)]
    head = nn.ModuleList([*made, Linear(hidden_size, vocab_size)])
    for param in head.parameters():
        param.attrs["reads"] = Fraction(0)
    return head
