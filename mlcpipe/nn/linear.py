"""Weights that a scheme may pack: linear layers, embeddings, experts.

The compiler reads a parameter's `attrs`: `pack` ("scheme" or "plain") stores it packed, or ("float32") as it is; `add`
is a constant that the converter adds (Gemma's 1 + w), `sources` are checkpoint tensors with other names, `order`
int32[rows] are the rows of the checkpoint's tensor in the order in which they are stored. See `weights/table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import plain_scheme


class Float32(nn.Parameter):
    """Numbers that a kernel reads in float32, whatever the model's dtype."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__(shape, "float32")
        self.attrs["pack"] = "float32"

    def to(self, dtype: str | None = None) -> None:
        """Stays float32."""


class Linear(nn.Module):
    """y = x W^T (+ b): x [m, in_features] -> [m, out_features]. `quantize=False` keeps W in the model dtype.

    `order` int32[out_features]: the rows of the checkpoint's tensors; None if that is their order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        quantize: bool = True,
        order: NDArray[np.int32] | None = None,
    ) -> None:
        self.weight = nn.Parameter((out_features, in_features))
        self.weight.attrs["pack"] = "scheme" if quantize else "plain"
        self.bias = nn.Parameter((out_features,)) if bias else None
        for parameter in (self.weight, self.bias):
            if parameter is not None and order is not None:
                parameter.attrs["order"] = order

    def forward(self, x: Tensor) -> Tensor:
        """x [m, in_features] -> [m, out_features]."""
        y = op.matmul(x, op.permute_dims(self.weight))
        return y if self.bias is None else op.add(y, self.bias)


class Embedding(nn.Module):
    """Rows of a table: ids i32[m] -> [m, features]; also the output projection when embeddings are tied."""

    def __init__(self, count: int, features: int, quantize: bool = True) -> None:
        self.weight = nn.Parameter((count, features))
        self.weight.attrs["pack"] = "scheme" if quantize else "plain"

    def forward(self, ids: Tensor) -> Tensor:
        """ids i32[m] -> [m, features]."""
        return op.take(self.weight, ids, axis=0)

    def project(self, x: Tensor) -> Tensor:
        """x [m, features] -> logits [m, count]."""
        return op.matmul(x, op.permute_dims(self.weight))


class HeadLinear(nn.Module):
    """A linear layer of each head, whose rows lie one after the other: W [heads * out_features, in_features]."""

    def __init__(self, heads: int, in_features: int, out_features: int) -> None:
        self.heads, self.in_features, self.out_features = heads, in_features, out_features
        self.weight = nn.Parameter((heads * out_features, in_features))
        self.weight.attrs["pack"] = "scheme"

    def forward(self, x: Tensor) -> Tensor:
        """x [m, heads, columns], of which the first are the inputs -> [m, heads, out_features]."""
        plain, row = plain_scheme(self.weight.dtype), load_layout("row")
        sizes = (self.heads, self.out_features, self.in_features, int(x.shape[2]))
        func = definitions.head_matmul(plain, row, *sizes, x.dtype)
        out = Tensor.placeholder((x.shape[0], self.heads, self.out_features), x.dtype)
        return op.tensor_ir_op(func, "head_matmul", [x, self.weight], out)


class ExpertLinear(nn.Module):
    """One linear layer per expert, chosen per token: W [experts, out_features, in_features].

    The `bias` of all experts in turn is not added here: readers of the products add it.
    """

    def __init__(
        self, experts: int, in_features: int, out_features: int, sources: list[list[str]], bias: bool = False
    ) -> None:
        """`sources[e]` names the checkpoint's modules, relative to the parent, whose rows form W[e]."""
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight = nn.Parameter((experts, out_features, in_features))
        self.weight.attrs["pack"] = "scheme"
        self.weight.attrs["sources"] = [[f"{name}.weight" for name in group] for group in sources]
        self.bias = nn.Parameter((experts * out_features,)) if bias else None
        if self.bias is not None:
            self.bias.attrs["sources"] = [[f"{name}.bias" for group in sources for name in group]]

    def forward(self, x: Tensor, ids: Tensor, shared: bool) -> Tensor:
        """x [m, in] (`shared`) or [m * top, in]; ids i32[m, top] -> [m * top, out]."""
        top = int(ids.shape[1])
        plain, row = plain_scheme(self.weight.dtype), load_layout("row")
        func = definitions.expert_matmul(
            plain, row, self.experts, self.out_features, self.in_features, top, shared, x.dtype
        )
        out = Tensor.placeholder((ids.shape[0] * top, self.out_features), x.dtype)
        return op.tensor_ir_op(func, "expert_matmul", [x, self.weight, ids], out)
