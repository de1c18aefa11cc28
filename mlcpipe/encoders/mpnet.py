"""MPNet (Song et al. 2020): BERT without token types, whose scores have biases by head and distance.

Models: all-mpnet-base-v2, multi-qa-mpnet-base, paraphrase-mpnet-base-v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.encoders.bert import Bert, bert_body
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_config import check_encoder
from mlcpipe.nn.encoder_layer import EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.text_encoder import TextEncoder
from tir_schedules.paged import biases_of_distances

NAMES = CheckpointNames(("", "mpnet."), ("pooler.", "lm_head.", "embeddings.position_ids"))
BUCKETS, FARTHEST = 32, 128  # transformers reads neither from config.json
FIRST_POSITION = 2


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for an MPNet config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    check_encoder(fields, ("MPNetModel", "MPNetForMaskedLM"), relative_attention_num_buckets=[None, BUCKETS])
    qkv = tuple(f"attention.attn.{part}" for part in "qkv")
    names = {"qkv": qkv, "out": ("attention.attn.o",), "norms": ("attention.LayerNorm", "output.LayerNorm")}
    facts, body = bert_body(fields, FIRST_POSITION, kind=_Mpnet, types=0, vocab_size=30527, **names)
    return TextEncoder(facts, body, NAMES)


class _Mpnet(Bert):
    """Bert with the biases of all layers."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, types: int, first: int) -> None:
        super().__init__(facts, spec, types, first)
        self.distances = facts.context_length - first
        self.encoder.relative_attention_bias = Embedding(BUCKETS, spec.num_heads, quantize=False)
        for layer in self.encoder.layer:
            layer.attention = replace(layer.attention, distances=self.distances)

    def forward(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens and types i32[n] -> [n, hidden]."""
        numbers = Tensor.from_const(_buckets(biases_of_distances(self.distances)))
        table = op.take(self.encoder.relative_attention_bias.weight, numbers, axis=0)
        kv.biases = op.astype(op.permute_dims(table), "float32")
        return super().forward(tokens, types, kv)


def _buckets(distances: NDArray[np.int32]) -> NDArray[np.int32]:
    """The bucket of each distance of a key from a query, as T5 has them (Raffel et al. 2020)."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    far = np.abs(distances)
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / exact) / np.float32(np.log(FARTHEST / exact))
    large = np.minimum(exact + (ratio * (half - exact)).astype(np.int32), half - 1)
    found: NDArray[np.int32] = ((distances > 0) * half + np.where(far < exact, far, large)).astype(np.int32)
    return found
