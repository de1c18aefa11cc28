"""Gemma 3 text models (Gemma Team 2025): Gemma 2 with head norms and a second rope for sliding layers.

Models: Gemma 3 270M, 1B; the text of Gemma 3 4B, 12B, 27B and MedGemma.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from mlcpipe.models.gemma2 import GGUF_NAMES, attentions, complete_gguf, embedding_scale
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import SANDWICH_NORM
from mlcpipe.nn.gguf import GgufFamily, GgufFile
from mlcpipe.nn.rope import Rope

DEFAULTS = dataclasses.replace(GEMMA2_DEFAULTS, positions=1 << 17, theta=1e6)
DEFAULT_WINDOW = 4096
DEFAULT_SLIDING_THETA = 1e4
DEFAULT_PATTERN = 6


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Gemma 3 text config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config,
        DEFAULTS,
        mlp_bias=[None, False],
        # transformers stores this field but never applies it.
        attn_logit_softcapping=[None],
        original_max_position_embeddings=[None],
    )
    window = base.fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    pattern = base.fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
    windows = layer_windows(base.fields, window, [(i + 1) % pattern != 0 for i in range(base.num_layers)])
    return decoder(
        base,
        attentions(base, windows, norm="head"),
        form=SANDWICH_NORM,
        ropes=ropes_by_layer_type(base, DEFAULT_SLIDING_THETA),
        rope_of=[0 if w is None else 1 for w in windows],
        logit_softcap=base.fields.optional_number("final_logit_softcapping", None, low=1e-6) or 0.0,
        embedding_scale=embedding_scale(base),
    )


def ropes_by_layer_type(base: BaseConfig, sliding_theta: float) -> tuple[Rope, Rope]:
    """The frequencies of full and sliding layers.

    New files have `rope_parameters` per layer type. Old ones have `rope_theta` and `rope_scaling` for
    full layers, and `rope_local_base_freq` for sliding ones, by default `sliding_theta`.
    """
    nested = base.fields.table("rope_parameters")
    unknown = [name for name in nested if name not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ConfigError(
            "field rope_parameters",
            where=base.fields.where,
            expected="full_attention and sliding_attention",
            found=", ".join(unknown),
        )
    scaling = base.fields.table("rope_scaling")
    if scaling and "rope_type" not in scaling:
        raise ConfigError(
            "field rope_scaling", where=base.fields.where, expected="a rope_type", found=", ".join(scaling)
        )
    tables = Fields(nested, "config.json rope_parameters")
    full = {**tables.table("full_attention"), **scaling}
    # transformers looks for `truncate` outside the nested table, where it never is.
    Fields(full, tables.where).refuse(truncate=[None, True])
    sliding_theta = base.fields.number("rope_local_base_freq", sliding_theta, low=1.0)
    return base.read_rope(full, base.theta), base.read_rope(tables.table("sliding_attention"), sliding_theta)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config, period=DEFAULT_PATTERN, window=0, largest_layers=62)
    config["rope_local_base_freq"] = file.number("rope.freq_base_swa", DEFAULT_SLIDING_THETA)
    config["final_logit_softcapping"] = file.number("final_logit_softcapping", 0.0) or None


GGUF = GgufFamily("gemma3", _complete_gguf, GGUF_NAMES, norm_offset=DEFAULTS.norm.offset)
