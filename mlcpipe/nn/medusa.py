"""Medusa heads (Cai et al. 2024, section 2.1.1): head i predicts the token i + 2 places after a row's own.

p_i = softmax(W_i (x + SiLU(V_i x + b_i))), where x is the input row of the model's own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.rows import columns, rows_of


class ResidualBlock(nn.Module):
    """x + SiLU(V x + b) for x [m, hidden]."""

    def __init__(self, hidden_size: int) -> None:
        self.linear = Linear(hidden_size, hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return op.add(x, op.silu(self.linear(x)))


class MedusaHeads(DraftHead):
    """`heads` heads, each of `blocks` residual blocks and a matrix of logits."""

    parameter = "medusa_head"

    def __init__(self, hidden_size: int, vocab_size: int, heads: int, blocks: int) -> None:
        self.heads = [
            nn.ModuleList([*(ResidualBlock(hidden_size) for _ in range(blocks)), Linear(hidden_size, vocab_size)])
            for _ in range(heads)
        ]
        self.module = nn.ModuleList(list(self.heads))
        for param in self.module.parameters():
            param.attrs["reads"] = Fraction(0)

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """As `DraftHead.functions`."""
        return {f"draft_head_{index}": partial(self._draft, model, index) for index in range(len(self.heads))}

    def _draft(self, model: Any, index: int, hidden: Tensor, rows: Tensor, logits: Tensor) -> Tensor:
        """hidden f32[h, hidden], rows i32[b] of it -> logits f32[b, vocab] of a head, which are written to `logits`."""
        x = op.tensor_expr_op(rows_of, "rows", [hidden, rows])
        x = columns(x, 0, int(x.shape[1]), model.dtype)
        for module in self.heads[index]:
            x = module(x)
        return x if x.dtype == "float32" else op.astype(x, "float32")

    def spec(self, model: Any) -> dict[str, Any]:
        """As `DraftHead.spec`."""
        tensor, facts = nn.spec.Tensor, model.facts
        head = {
            "hidden": tensor(["h", facts.hidden_size], "float32"),
            "rows": tensor(["b"], "int32"),
            "logits": tensor(["b", facts.vocab_size], "float32"),
            "$": {"param_mode": "plain", "effect_mode": "none"},
        }
        return {f"draft_head_{index}": head for index in range(len(self.heads))}
