"""Families of text encoders, one file each, named after Hugging Face's `model_type`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model
from mlcpipe.nn.attention_spec import AttentionBlock
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, build_from
from mlcpipe.nn.language_model import Stateful, blocks_of
from mlcpipe.nn.text_encoder import DecoderEncoder, TextEncoder

_FIRST_NAMES = {"new": "gte"}  # of files that are older than their family in transformers
_BOTH_SIDES, _CAUSAL = "use_bidirectional_attention", "is_causal"


def encoder_types() -> list[str]:
    """The supported families, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def encoder_of(config: Mapping[str, Any]) -> str | None:
    """The family of a config.json, some of which are written with a hyphen; None if it is none of this folder."""
    name = str(config.get("model_type")).replace("-", "_")
    name = _FIRST_NAMES.get(name, name)
    return name if name in encoder_types() else None


def build_encoder(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a config.json: a family of this folder, or a decoder of `mlcpipe.models`.

    Raises ConfigError for an unknown family or unsupported field.
    """
    name = encoder_of(config)
    if name is None:
        model: Any = _of_decoder(_with_head(config))
    else:
        model = build_from(config, importlib.import_module(f"mlcpipe.encoders.{name}").build)
    assert isinstance(model, TextEncoder)
    model.add_dense(config.get("dense_modules", ()))
    return model


def _of_decoder(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder of a decoder, whose tokens see all others where config.json says so.

    Windows of Gemma 3 (EmbeddingGemma) then reach half as far, to both sides. Raises ConfigError for other windows.
    """
    gemma = config.get("model_type") == "gemma3_text" and config.get(_BOTH_SIDES) is True
    if not gemma and config.get(_CAUSAL) is not False:
        return DecoderEncoder(_uniform(build_model(config)))
    stated = {key: value for key, value in config.items() if key not in (_BOTH_SIDES, _CAUSAL)}
    if gemma:
        stated["sliding_window"] = Fields(config).integer("sliding_window", 4096) // 2 + 1
    model = _uniform(build_model(stated))
    if not gemma and any(one.window is not None for one in model.attentions()):
        raise ConfigError(f"field {_CAUSAL}", where="config.json", expected="no window beside it", found="false")
    return DecoderEncoder(model, bidirectional=True)


def _uniform(model: CausalLM) -> CausalLM:
    """The model. Raises ConfigError for one that keeps more than keys and values, of one shape in all layers."""
    kinds = {replace(of, window=None) for of in model.attentions()}
    others = any(not isinstance(block, AttentionBlock) for block in blocks_of(model.model, Stateful))
    if others or model.model.per_layer is not None or len(kinds) != 1:
        raise ConfigError(
            f"layers of {model.facts.model_type}", where="an embedding model", found="other layers",
            expected="attention of one shape in every layer, of hidden states alone",
        )  # fmt: skip
    return model


def _with_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a decoder saved without its language model head, as if it had one."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return config
    named = (f"{str(name).removesuffix('Model')}ForCausalLM" if str(name).endswith("Model") else name for name in names)
    return {**config, "architectures": list(named)}
