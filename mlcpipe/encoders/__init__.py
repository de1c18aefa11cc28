"""Families of text encoders, one file each, named after Hugging Face's `model_type`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlcpipe.models import build_model
from mlcpipe.nn.config import build_from
from mlcpipe.nn.text_encoder import DecoderEncoder, TextEncoder


def encoder_types() -> list[str]:
    """The supported families, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))


def encoder_of(config: Mapping[str, Any]) -> str | None:
    """The family of a config.json, some of which are written with a hyphen; None if it is none of this folder."""
    name = str(config.get("model_type")).replace("-", "_")
    return name if name in encoder_types() else None


def build_encoder(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a config.json: a family of this folder, or a decoder of `mlcpipe.models`.

    Raises ConfigError for an unknown family or unsupported field.
    """
    name = encoder_of(config)
    if name is None:
        return DecoderEncoder(build_model(_with_head(config)))
    model = build_from(config, importlib.import_module(f"mlcpipe.encoders.{name}").build)
    assert isinstance(model, TextEncoder)
    return model


def _with_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a decoder saved without its language model head, as if it had one."""
    names = config.get("architectures")
    if not isinstance(names, list):
        return config
    named = (f"{str(name).removesuffix('Model')}ForCausalLM" if str(name).endswith("Model") else name for name in names)
    return {**config, "architectures": list(named)}
