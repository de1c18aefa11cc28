"""HyperCLOVA X (NAVER 2025): Granite with norms also after attention and MLP; logits are multiplied, not divided.

Models: HyperCLOVA X SEED Think 14B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.granite import multiplied
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder_layer import PRE_NORM

DEFAULTS = Defaults(positions=2048)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a HyperCLOVA X config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None])
    fields = base.fields
    layer_windows(fields, None, [False] * base.num_layers, fixed=True)
    bias, scale = fields.flag("mlp_bias", False), fields.number("attention_multiplier", base.head_dim**-0.5, low=1e-6)
    form = replace(PRE_NORM, after_mixer="post_norm1", after_mlp="post_norm2")
    return multiplied(
        base,
        lambda i: base.mlp(bias=bias),
        lambda i, attention: replace(attention, scale=scale),
        form=form if fields.flag("use_post_norm", True) else PRE_NORM,
        logit_scale=fields.number("logits_scaling", 1.0, low=1e-6),
    )
