"""Granite 3 and 4 dense models (IBM 2024): Llama with multipliers of embeddings, residuals, scores and logits.

Models: Granite 3 2B, 8B; Granite 4 Micro 3B, 350M, 1B (dense).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.llama import complete_gguf as complete_llama
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile

DEFAULTS = Defaults(positions=2048)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Granite config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None])
    mlp_bias = base.fields.flag("mlp_bias", False)
    return multiplied(base, lambda i: base.mlp(bias=mlp_bias))


def multiplied(
    base: BaseConfig,
    mlp: Callable[[int], nn.Module],
    mixer: Callable[[int, AttentionSpec], AttentionSpec | Mixer] | None = None,
    **options: Any,
) -> CausalLM:
    """The model with these MLPs and the multipliers of its config.json.

    `mixer(i, attention)` is what layer i has in place of attention, or that; `options` are those of `decoder`.
    """
    fields = base.fields
    bias = fields.flag("attention_bias", False)
    of: dict[str, Any] = {
        "qkv_bias": bias,
        "o_bias": bias,
        "scale": fields.number("attention_multiplier", 1.0, low=1e-6),
    }
    every = range(base.num_layers)
    options.setdefault("logit_scale", 1.0 / fields.number("logits_scaling", 1.0, low=1e-6))
    return decoder(
        base,
        base.attentions(**of) if mixer is None else [mixer(i, base.attention(**of)) for i in every],
        mlp,
        scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        **options,
    )


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF's `granite` has."""
    complete_llama(file, config)
    for field, key in (
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        config[field] = file.number(key, 0.0) or (config["head_dim"] ** -0.5 if key == "attention.scale" else 1.0)


GGUF = GgufFamily("granite", complete_gguf, interleaved=True)
