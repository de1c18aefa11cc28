"""A text encoder: computes rows of numbers for all texts of a step at once; each text attends within itself.

The texts are sequences of a step as `tir_schedules/step_layout.py` describes it. Keys and values are in pages only
during a layer, so all layers share the pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.encoder_layer import EncoderLayer
from mlcpipe.nn.language_model import LanguageModel, ModelFacts, blocks_of
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rows import rows_of, scaled
from mlcpipe.nn.step_states import StepStates, argument


class TextEncoder(LanguageModel):
    """The compiled library's `embed_texts`, around a body called as `body(tokens, types, kv) -> [n, hidden]`."""

    def __init__(
        self, facts: ModelFacts, body: nn.Module, names: CheckpointNames, *, bidirectional: bool = True
    ) -> None:
        super().__init__(facts)
        self.model, self.names, self.bidirectional = body, names, bidirectional
        self.dense = nn.ModuleList([])

    def attentions(self) -> list[AttentionSpec]:
        """As `LanguageModel.attentions`."""
        return [layer.attention for layer in blocks_of(self.model, EncoderLayer)] or super().attentions()

    def states(self) -> list[State]:
        """One state for all layers: a layer's keys and values are not needed after it."""
        first = self.attentions()[0]
        return [self.attention_state(replace(first, window=None), "attention", *range(self.facts.num_layers))]

    def add_dense(self, modules: Sequence[Mapping[str, Any]]) -> None:
        """Add sentence-transformers' dense layers, which come after the pooling: each row goes through them.

        Pooling that chooses a row, and a mean without activations after it, give the same. Raises ConfigError for
        layers that do not follow each other.
        """
        for one in modules:
            if one["in_features"] != self.width:
                raise ConfigError("field in_features of a dense layer", expected=self.width, found=one["in_features"])
            self.dense.append(Dense(one["in_features"], one["out_features"], one["bias"], one["activation"]))

    @property
    def width(self) -> int:
        """Length of a row of the result."""
        return int(self.dense[-1].weight.shape[0]) if len(self.dense) else self.facts.hidden_size

    def embed_texts(
        self, tokens: Tensor, types: Tensor, rows: Tensor, step: Tensor, embeddings: Tensor, states: list[Tensor]
    ) -> Tensor:
        """tokens and their token types i32[n], rows i32[r] -> f32[r, width] of those rows, written to `embeddings`.

        `step` and `states` are those of `StepStates`.
        """
        kv = StepStates(self, self.states(), step, states, True, self.bidirectional)
        y = self.head(op.tensor_expr_op(rows_of, "rows", [self.body(tokens, types, kv), rows]))
        for layer in self.dense:
            y = layer(y)
        return y if y.dtype == "float32" else op.astype(y, "float32")

    def body(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens and types i32[n] -> hidden states [n, hidden]."""
        return self.model(tokens, types, kv)

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states [r, hidden] -> [r, width]."""
        return hidden

    def spec(self) -> dict[str, Any]:
        """Argument specifications of `embed_texts`; the sizes are those of `entry_points`."""
        tensor = nn.spec.Tensor
        return {
            "embed_texts": {
                "tokens": tensor(["n"], "int32"),
                "types": tensor(["n"], "int32"),
                "rows": tensor(["r"], "int32"),
                "step": tensor(["k"], "int32"),
                "embeddings": tensor(["r", self.width], "float32"),
                "states": argument(self.states()),
                "$": {"param_mode": "plain", "effect_mode": "none"},
            }
        }


class Dense(Linear):
    """activation(x W^T + b): x [m, in_features] -> [m, out_features]; "identity" or "tanh"."""

    def __init__(self, in_features: int, out_features: int, bias: bool, activation: str) -> None:
        super().__init__(in_features, out_features, bias, quantize=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return op.tanh(y) if self.activation == "tanh" else y


class DecoderEncoder(TextEncoder):
    """A language model as an encoder: no next token is sampled; tokens attend to those before them or to all."""

    def __init__(self, model: CausalLM, *, bidirectional: bool = False) -> None:
        head = model.names.published("lm_head.weight").removesuffix("weight")
        names = replace(model.names, unused=(*model.names.unused, head))
        super().__init__(model.facts, model.model, names, bidirectional=bidirectional)

    def body(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens i32[n] -> hidden states [n, hidden]."""
        return self.model(scaled(self.model.embed_tokens(tokens), self.facts.embedding_scale), kv)[-1]
