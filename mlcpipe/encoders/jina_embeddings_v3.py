"""Jina Embeddings 3 (Sturua et al. 2024): XLM-RoBERTa with rotary positions, without the adapters of its tasks.

Models: jina-embeddings-v3-hf. The first file, whose layers hold the adapters of five tasks, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.encoders.nomic_bert import RotaryBert
from mlcpipe.nn.config import Fields, rope_table
from mlcpipe.nn.encoder_config import check_encoder, encoder_facts
from mlcpipe.nn.encoder_layer import EncoderSpec
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rope import read_rope
from mlcpipe.nn.text_encoder import TextEncoder

ARCHITECTURES = ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM")
NAMES = CheckpointNames(("", "roberta."), ("pooler.", "lm_head."))


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a Jina Embeddings 3 config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    check_encoder(fields, ARCHITECTURES)
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 1024),
        intermediate_size=fields.integer("intermediate_size", 4096),
        num_heads=fields.integer("num_attention_heads", 16, high=4096),
        act=fields.get("hidden_act", "gelu"),
        eps=fields.number("layer_norm_eps", 1e-5, low=0.0, high=1.0),
        qkv=("mixer.Wqkv",),
        out=("mixer.out_proj",),
        up=("mlp.fc1",),
        down=("mlp.fc2",),
        norms=("norm1", "norm2"),
    )
    layers = fields.integer("num_hidden_layers", 24, high=1024)
    positions = fields.integer("max_position_embeddings", 8194, high=1 << 30)
    theta = fields.number("rope_theta", 20_000.0, low=1.0)
    dim = spec.hidden_size // spec.num_heads
    rope = read_rope(rope_table(fields), dim, positions, theta=theta, kinds=("default",))
    facts = encoder_facts(
        fields, spec, layers=layers, positions=8194, vocab_size=250002, ropes=[rope], rope_of=[0] * layers
    )
    return TextEncoder(facts, RotaryBert(facts, spec, fields.integer("type_vocab_size", 1)), NAMES)
