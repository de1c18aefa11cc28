"""GTE (Zhang et al. 2024): BERT with rotary positions and a gated MLP; classifiers rank documents.

Models: gte-multilingual-base, gte-multilingual-reranker-base, gte-base-en-v1.5, gte-large-en-v1.5,
snowflake-arctic-embed-m-v2.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.encoders.bert import CrossEncoder
from mlcpipe.nn.config import Fields, rope_table
from mlcpipe.nn.encoder_config import check_encoder, encoder_facts, one_label
from mlcpipe.nn.encoder_layer import EncoderLayer, EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.rope import Rope, cos_sin, read_rope
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.text_encoder import TextEncoder

_RANKS = "ForSequenceClassification"
ARCHITECTURES = tuple(
    f"{name}{kind}" for name in ("Gte", "New") for kind in ("Model", "ForMaskedLM", "ForTokenClassification", _RANKS)
)
NAMES = CheckpointNames(("", "new.", "gte."), ("pooler.", "lm_head.", "classifier."))
DEFAULT_THETA = 160_000.0
# Values of published files' own fields that define the family.
_FIXED: Mapping[str, list[Any]] = {
    "position_embedding_type": [None, "rope"],
    "layer_norm_type": [None, "layer_norm"],
    "logn_attention_scale": [None, False],
    "pack_qkv": [None, True],
}


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a GTE config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    architecture = check_encoder(fields, ARCHITECTURES, **_FIXED)
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=fields.integer("num_attention_heads", 12, high=4096),
        act=fields.get("hidden_act", "gelu"),
        eps=fields.number("layer_norm_eps", 1e-12, low=0.0, high=1.0),
        gated=True,
        up_bias=False,
        up_first=True,
        qkv=("attention.qkv_proj",),
        out=("attention.o_proj",),
        up=("mlp.up_gate_proj",),
        down=("mlp.down_proj",),
        norms=("attn_ln", "mlp_ln"),
    )
    layers = fields.integer("num_hidden_layers", 12, high=1024)
    positions = fields.integer("max_position_embeddings", 8192, high=1 << 30)
    rope = _rope(fields, spec.hidden_size // spec.num_heads, positions)
    facts = encoder_facts(
        fields, spec, layers=layers, positions=8192, vocab_size=250048, ropes=[rope], rope_of=[0] * layers
    )
    body = _Gte(facts, spec, fields.integer("type_vocab_size", 1, low=0))
    if not architecture.endswith(_RANKS):
        return TextEncoder(facts, body, NAMES)
    one_label(fields)
    return CrossEncoder(facts, body, CheckpointNames(("new.", "gte.")))


def _rope(fields: Fields, head_dim: int, positions: int) -> Rope:
    """The frequencies; `ntk` multiplies theta by its factor, and divides all by factor^(2 / head_dim)."""
    table, theta = Fields(rope_table(fields)), fields.number("rope_theta", DEFAULT_THETA, low=1.0)
    if table.get("type") != "ntk":
        return read_rope(table.values, head_dim, positions, theta=theta, kinds=("default",))
    table.refuse(mixed_b=[None])
    factor = table.number("factor", low=1.0)
    scaled = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / max(1, head_dim))}
    return read_rope(scaled, head_dim, positions, theta=theta)


class _Embeddings(nn.Module):
    """norm(word + token type), named as in the checkpoint."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, types: int) -> None:
        self.word_embeddings = Embedding(facts.vocab_size, facts.hidden_size)
        self.token_type_embeddings = Embedding(types, facts.hidden_size, quantize=False) if types else None
        self.LayerNorm = LayerNorm(facts.hidden_size, spec.eps)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        """Two times i32[n] -> [n, hidden]."""
        x = self.word_embeddings(tokens)
        return self.LayerNorm(op.add(x, self.token_type_embeddings(types)) if self.token_type_embeddings else x)


class _Layers(nn.Module):
    """The layers, named as in the checkpoint."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec) -> None:
        self.layer = nn.ModuleList([EncoderLayer(spec, index) for index in range(facts.num_layers)])


class _Gte(nn.Module):
    """Embeddings and layers."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, types: int) -> None:
        self.rope = facts.ropes[0]
        self.embeddings = _Embeddings(facts, spec, types)
        self.encoder = _Layers(facts, spec)

    def forward(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens and types i32[n] -> [n, hidden]."""
        x = self.embeddings(tokens, types)
        rotation = cos_sin(self.rope, kv.positions(tokens.shape[0]), None)
        for layer in self.encoder.layer:
            x = layer(x, kv, rotation)
        return x
