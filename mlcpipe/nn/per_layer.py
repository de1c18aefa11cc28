"""Embeddings for each layer (Gemma 3n, Google 2025): a token has a row of its own for every layer's update."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import scaled

NAMES = {
    "per_layer.table": "embed_tokens_per_layer",
    "per_layer.projection": "per_layer_model_projection",
    "per_layer.norm": "per_layer_projection_norm",
}
LAYER_NAMES = {
    "per_layer.gate": "per_layer_input_gate",
    "per_layer.projection": "per_layer_projection",
    "per_layer.norm": "post_per_layer_input_norm",
}

# llama.cpp's names of the same.
GGUF_NAMES = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


class PerLayerInputs(nn.Module):
    """(norm(projection(x) / sqrt(hidden)) + sqrt(size) * table[token]) / sqrt(2), norms over the `size` of each layer.

    A step reads the rows of its tokens alone. Tokens beyond the table have row 0.
    """

    def __init__(self, tokens: int, layers: int, size: int, hidden_size: int, norm: NormSpec) -> None:
        self.tokens, self.size, self.layers, self.hidden_size = tokens, size, layers, hidden_size
        self.table = Embedding(tokens, layers * size)
        self.table.weight.attrs |= {"reads": Fraction(1, tokens), "by_token": True}
        self.projection = Linear(hidden_size, layers * size)
        self.norm = norm(size)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids i32[m], x [m, hidden] -> [m, layers * size]."""
        m, width = x.shape[0], self.layers * self.size
        y = scaled(self.projection(x), self.hidden_size**-0.5)
        y = op.reshape(self.norm(op.reshape(y, (m * self.layers, self.size))), (m, width))
        rows = self.table(op.tensor_expr_op(self._known, "known_tokens", [ids]))
        return scaled(op.add(y, scaled(rows, self.size**0.5)), 2**-0.5)

    def _known(self, ids: te.Tensor) -> te.Tensor:
        return te.compute(ids.shape, lambda i: te.if_then_else(ids[i] < self.tokens, ids[i], 0), name="known_tokens")


class PerLayerUpdate(nn.Module):
    """norm(projection(act(gate(x)) * e)) for the layer's part e of `PerLayerInputs`."""

    def __init__(self, layer: int, size: int, hidden_size: int, act: str, norm: NormSpec) -> None:
        self.layer, self.size, self.act = layer, size, activation(act)
        self.gate = Linear(hidden_size, size)
        self.projection = Linear(size, hidden_size)
        self.norm = norm(hidden_size)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x [m, hidden], inputs [m, layers * size] -> [m, hidden]."""
        begin = Tensor.from_const(np.array([self.layer * self.size], np.int32))  # so that layers share a kernel
        part = op.tensor_expr_op(_times_columns, "per_layer_product", [self.act(self.gate(x)), inputs, begin])
        return self.norm(self.projection(part))


def _times_columns(x: te.Tensor, inputs: te.Tensor, begin: te.Tensor) -> te.Tensor:
    """x [m, size] times the columns of `inputs` from begin[0] on."""
    return te.compute(x.shape, lambda i, j: x[i, j] * inputs[i, begin[0].astype("int64") + j], name="product")
