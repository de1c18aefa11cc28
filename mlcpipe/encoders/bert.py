"""BERT (Devlin et al. 2019), and cross-encoders made of it: `BertForSequenceClassification` with one label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_config import check_encoder, encoder_facts, one_label
from mlcpipe.nn.encoder_layer import EncoderLayer, EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.text_encoder import TextEncoder

ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
NAMES_OF_PARTS: dict[str, Any] = {
    "qkv": tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    "out": ("attention.output.dense",),
    "norms": ("attention.output.LayerNorm", "output.LayerNorm"),
}
NAMES = CheckpointNames(("", "bert."), ("pooler.", "cls.", "embeddings.position_ids"))


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a BERT config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    architecture = check_encoder(fields, ARCHITECTURES, position_embedding_type=[None, "absolute"])
    facts, body = bert_body(fields)
    if architecture != "BertForSequenceClassification":
        return TextEncoder(facts, body, NAMES)
    one_label(fields)
    return CrossEncoder(facts, body, CheckpointNames(("bert.",), ("embeddings.position_ids",)))


def bert_body(
    fields: Fields,
    first: int = 0,
    *,
    kind: type[Bert] | None = None,
    types: int | None = None,
    vocab_size: int = 30522,
    **names: Any,
) -> tuple[ModelFacts, Bert]:
    """The facts and the body of models like BERT, whose first token has the position `first` in the table.

    `kind` of body, number of token `types` that config.json does not say, and `names` that EncoderSpec has otherwise.
    """
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=fields.integer("num_attention_heads", 12, high=4096),
        act=fields.get("hidden_act", "gelu"),
        eps=fields.number("layer_norm_eps", 1e-12, low=0.0, high=1.0),
        up=("intermediate.dense",),
        down=("output.dense",),
        **(NAMES_OF_PARTS | names),
    )
    layers = fields.integer("num_hidden_layers", 12, high=1024)
    facts = encoder_facts(fields, spec, layers=layers, positions=512, vocab_size=vocab_size)
    types = fields.integer("type_vocab_size", 2) if types is None else types
    body = (kind or Bert)(facts, spec, types, first)
    return replace(facts, context_length=facts.context_length - first), body


class _Embeddings(nn.Module):
    """norm(word + position + token type)."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, types: int, first: int) -> None:
        self.first = first
        self.word_embeddings = Embedding(facts.vocab_size, facts.hidden_size)
        self.position_embeddings = Embedding(facts.context_length, facts.hidden_size, quantize=False)
        self.token_type_embeddings = Embedding(types, facts.hidden_size, quantize=False) if types else None
        self.LayerNorm = LayerNorm(facts.hidden_size, spec.eps)

    def forward(self, tokens: Tensor, types: Tensor, positions: Tensor) -> Tensor:
        """Three times i32[n] -> [n, hidden]."""
        if self.first:
            positions = op.add(positions, Tensor.from_scalar(self.first, "int32"))
        x = op.add(self.word_embeddings(tokens), self.position_embeddings(positions))
        return self.LayerNorm(op.add(x, self.token_type_embeddings(types)) if self.token_type_embeddings else x)


class _Layers(nn.Module):
    """The layers, named as in the checkpoint."""

    def __init__(self, spec: EncoderSpec, count: int) -> None:
        self.layer = nn.ModuleList([EncoderLayer(spec, index) for index in range(count)])


class Bert(nn.Module):
    """Embeddings and layers."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, types: int, first: int) -> None:
        self.embeddings = _Embeddings(facts, spec, types, first)
        self.encoder = _Layers(spec, facts.num_layers)

    def forward(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens and types i32[n] -> [n, hidden]."""
        x = self.embeddings(tokens, types, kv.positions(tokens.shape[0]))
        for layer in self.encoder.layer:
            x = layer(x, kv, None)
        return x


class _Pooler(nn.Module):
    """A dense layer, named as in the checkpoint."""

    def __init__(self, hidden_size: int) -> None:
        self.dense = Linear(hidden_size, hidden_size, True)


class CrossEncoder(TextEncoder):
    """The score of a query and a document that follow each other: classifier(tanh(dense(first token)))."""

    def __init__(self, facts: ModelFacts, body: nn.Module, names: CheckpointNames) -> None:
        body.pooler = _Pooler(facts.hidden_size)
        super().__init__(facts, body, names)
        self.classifier = Linear(facts.hidden_size, 1, True, quantize=False)

    @property
    def width(self) -> int:
        return 1

    def head(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, 1], before the sigmoid."""
        return self.classifier(op.tanh(self.model.pooler.dense(hidden)))
