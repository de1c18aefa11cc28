"""Muse Glimmer (Meta 2026): gated attention, bare norms of heads, embeddings and no RoPE in full layers; four norms.

Models: the text of Muse Glimmer 30B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.granite_swa import layer_thetas
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import SANDWICH_NORM
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=131072, num_kv_heads=2, head_dim=128, norm=NormSpec(eps=1e-5, offset=1.0),
    names={"hidden_act": "hidden_activation"},
)  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Muse Glimmer text config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False], rope_scaling=[None])
    fields, count = base.fields, base.num_layers
    slides = [(count - 1 - i) % 4 > 0 for i in range(count)]
    windows = layer_windows(fields, fields.optional_integer("sliding_window", 2048), slides)
    thetas = layer_thetas(base, tuple(i for i, slide in enumerate(slides) if not slide))
    rotated = [one > 0 for one in thetas]
    theta = float(rope_table(fields).get("rope_theta") or base.theta)
    fields.refuse(**({} if {*thetas} <= {0.0, theta} else {"layer_rope_theta": ()}))  # transformers rotates by one
    bare, bias = NormSpec(eps=base.norm.eps, weight=False), fields.flag("attention_bias", False)
    specs = base.attentions(
        windows, qkv_bias=bias, o_bias=bias, norm="head", norm_of=bare, gate="element",
        scale=base.head_dim**-0.5 * fields.number("qk_scale_factor", 3.87),
    )  # fmt: skip
    return decoder(
        base,
        specs,
        form=replace(SANDWICH_NORM, after_eps=fields.number("post_norm_eps", 1e-8, low=0.0, high=1.0)),
        rotated=rotated,
        norm=NormSpec(eps=base.norm.eps),
        embedding_norm=bare,
        logit_scale=fields.number("output_multiplier", 0.19611613513818404),
        logit_softcap=fields.number("final_logit_softcapping", 20.0, low=1e-6),
    )
