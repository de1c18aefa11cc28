"""Model families, one file each, named after Hugging Face's `model_type`; `diffusion` has those by diffusion."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, build_from
from mlcpipe.nn.gguf import GgufFamily
from mlcpipe.nn.language_model import blocks_of
from mlcpipe.nn.names import CheckpointNames

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TWO_PASSES = ("diffusion_gemma",)  # which reads and writes by two passes


def model_types() -> list[str]:
    """The supported families whose models write one token after the other, sorted."""
    return _files(Path(__file__).parent)


def diffusion_types() -> list[str]:
    """The supported families whose models denoise blocks or whole answers, sorted."""
    return _files(Path(__file__).parent / "diffusion")


def _files(folder: Path) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.ispkg)


def gguf_families() -> dict[str, GgufFamily]:
    """How the families that GGUF has are stored there, by model type."""
    found = {name: getattr(_module(name), "GGUF", None) for name in model_types()}
    return {name: one for name, one in found.items() if one is not None}


def checkpoint_names(model_type: str) -> CheckpointNames:
    """How checkpoints of a family name their tensors: its file's `NAMES`, if they differ from Llama's."""
    names: CheckpointNames = getattr(_module(model_type), "NAMES", CheckpointNames())
    return names


def build_model(config: Mapping[str, Any]) -> CausalLM:
    """The module for a config.json. Raises ConfigError for an unknown family or unsupported field."""
    model_type = config.get("model_type")
    if model_type in _TWO_PASSES:
        raise ConfigError(
            "text by diffusion with a pass to read and one to write", where="config.json model_type",
            found=repr(model_type), expected=f"a family by diffusion: {', '.join(diffusion_types())}",
        )  # fmt: skip
    known = [*model_types(), *diffusion_types()]
    if not isinstance(model_type, str) or not _NAME.fullmatch(model_type) or model_type not in known:
        raise ConfigError(
            "unknown architecture",
            where="config.json model_type",
            expected=f"one of the {len(known)} in docs/families.md, such as llama or qwen3",
            found=repr(model_type),
            next_step="take a model of one of these; a GGUF file of this one does not help",
        )
    model = build_from(config, _module(model_type).build)
    assert isinstance(model, CausalLM)
    layers = model.facts.num_layers
    names = checkpoint_names(model_type).with_draft_layer(layers)
    drafts = Fields(config).integer("num_nextn_predict_layers", 0, low=0, high=64)
    unused = [f"{names.layers}.{layers + i}." for i in range(drafts)]  # layers that draft tokens
    for block in blocks_of(model.model, Attention):
        if block.reads_another:  # files may have what it does not need
            prefix = f"{names.layers}.{block.layer}.self_attn."
            unused += [f"{prefix}{one}." for one in ("k_proj", "v_proj", "k_norm", "v_norm")]
    for index, layer in enumerate(model.model.layers):  # nor of what another layer keeps
        unused += [f"{names.layers}.{index}.{one}" for one in getattr(layer, "unused", ())]
    model.names = replace(names, unused=(*names.unused, *unused))
    return model


def _module(model_type: str) -> Any:
    folder = "diffusion." if model_type in diffusion_types() else ""
    return importlib.import_module(f"mlcpipe.models.{folder}{model_type}")
