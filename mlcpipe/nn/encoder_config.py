"""The config.json fields that encoder families share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.rope import Rope


def check_encoder(fields: Fields, architectures: Sequence[str], **neutral: Sequence[Any]) -> str:
    """The checkpoint's class, one of `architectures`; the first if config.json names none.

    Raises ConfigError for another class, and for fields, with their `neutral` values, that are not supported.
    """
    fields.refuse(**{"is_causal": [None, False], "is_decoder": [None, False], **neutral})
    found = fields.get("architectures", list(architectures[:1]))
    if not isinstance(found, list) or len(found) != 1 or found[0] not in architectures:
        raise ConfigError(
            "architecture", where="config.json architectures", expected=" or ".join(architectures),
            found=repr(found)[:80],
        )  # fmt: skip
    return str(found[0])


def one_label(fields: Fields) -> None:
    """Raises ConfigError unless a classifier has exactly one label, whose score ranks documents."""
    labels = fields.get("id2label", {0: "", 1: ""})
    count = fields.get("num_labels", len(labels) if isinstance(labels, dict) else labels)
    if count != 1:
        raise ConfigError(
            "labels of the classifier", where="config.json id2label", expected="one", found=repr(count)[:80]
        )


def encoder_facts(
    fields: Fields,
    spec: EncoderSpec,
    *,
    layers: int,
    positions: int,
    vocab_size: int,
    ropes: Sequence[Rope] = (),
    rope_of: Sequence[int] = (),
) -> ModelFacts:
    """The model's facts; `positions` and `vocab_size` are the family's defaults. Raises ConfigError."""
    if spec.hidden_size % spec.num_heads:
        raise ConfigError(
            "field num_attention_heads", where=fields.where, expected=f"a divisor of {spec.hidden_size}",
            found=spec.num_heads,
        )  # fmt: skip
    options: dict[str, Any] = {"ropes": tuple(ropes), "rope_of": tuple(rope_of)}
    return ModelFacts(
        model_type=str(fields.get("model_type")),
        vocab_size=fields.integer("vocab_size", vocab_size),
        hidden_size=spec.hidden_size,
        num_layers=layers,
        context_length=fields.integer("max_position_embeddings", positions, high=1 << 30),
        **options,
    )
