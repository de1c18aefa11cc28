"""OPT and Galactica (Zhang et al. 2022; Taylor et al. 2022): learned positions, norms before attention and MLP.

Models: OPT 125M, 1.3B to 66B (not 350M), Galactica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.models.gpt2 import learned
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048,
    fixed_heads=True,
    norm=NormSpec("layer", 1e-5, bias=True),
    tied=True,
    act="relu",
    intermediate_size=3072,
    names={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)
NAMES = CheckpointNames(
    prefixes=("model.decoder.", "decoder."),
    top={"norm": "final_layer_norm"},
    layer={
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
)
FIRST_POSITION = 2
# What OPT 350M has otherwise, and no other model of the family.
FIXED: Mapping[str, list[Any]] = {
    "do_layer_norm_before": [None, True],
    "_remove_final_layer_norm": [None, False],
    "rms_norm_eps": [None],  # it is PyTorch's
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OPT config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields = base.fields
    fields.refuse(word_embed_proj_dim=[None, base.hidden_size])
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    base = replace(base, norm=replace(base.norm, weight=affine))
    return learned(base, base.attentions(qkv_bias=bias, o_bias=bias), bias, FIRST_POSITION)
