"""XLM-RoBERTa (Conneau et al. 2020): BERT whose positions begin after that of padding; classifiers rank documents.

Models: bge-m3 (dense), bge-reranker-v2-m3, multilingual-e5, snowflake-arctic-embed-l.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.encoders.bert import Bert, bert_body
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_config import check_encoder, one_label
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.text_encoder import TextEncoder

ARCHITECTURES = ("XLMRobertaModel", "XLMRobertaForMaskedLM", "XLMRobertaForSequenceClassification")
NAMES = CheckpointNames(("", "roberta."), ("pooler.", "lm_head.", "embeddings.position_ids"))


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for an XLM-RoBERTa config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    architecture = check_encoder(
        fields, ARCHITECTURES, position_embedding_type=[None, "absolute"], lora_adaptations=[None]
    )
    facts, body = bert_body(fields, fields.integer("pad_token_id", 1, low=0, high=1024) + 1)
    if not architecture.endswith("ForSequenceClassification"):
        return TextEncoder(facts, body, NAMES)
    one_label(fields)
    return _CrossEncoder(facts, body)


class _Head(nn.Module):
    """out_proj(tanh(dense(x))): x [r, hidden] -> [r, 1]."""

    def __init__(self, hidden_size: int) -> None:
        self.dense = Linear(hidden_size, hidden_size, True)
        self.out_proj = Linear(hidden_size, 1, True, quantize=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(op.tanh(self.dense(x)))


class _CrossEncoder(TextEncoder):
    """The score of a query and a document that follow each other, of the first token."""

    def __init__(self, facts: ModelFacts, body: Bert) -> None:
        super().__init__(facts, body, CheckpointNames(("roberta.",), ("embeddings.position_ids",)))
        self.classifier = _Head(facts.hidden_size)

    @property
    def width(self) -> int:
        return 1

    def head(self, hidden: Tensor) -> Tensor:
        """[r, hidden] -> [r, 1], before the sigmoid."""
        return self.classifier(hidden)
