"""Muse Glimmer (Meta 2026): gated attention, bare norms of heads, embeddings and no RoPE in full layers; four norms.

Models: the text of Muse Glimmer 30B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.granite_swa import layer_thetas
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows, rope_table
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import SANDWICH_NORM
from mlcpipe.nn.gguf import ATTENTION, MLP, GgufFamily, GgufFile, read_windows
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


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Layers that slide rotate, by one frequency; llama.cpp has `post_norm_eps` of 1e-8 alone."""
    file.integer("attention.sliding_window")
    read_windows(file, config, 4)
    theta = config["rope_theta"] = file.number("rope.freq_base_swa", config["rope_theta"])
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "final_logit_softcapping": file.number("final_logit_softcapping"),
        "layer_rope_theta": [theta if kind == "sliding_attention" else 0.0 for kind in config["layer_types"]],
        "output_multiplier": file.number("logit_scale"),
        "qk_scale_factor": _scale(file, len(config["layer_types"]), config["head_dim"]),
    }


def _scale(file: GgufFile, layers: int, size: int) -> float:
    """What queries are multiplied by, which files have as the weights of their norms. Raises ConfigError for others."""
    found = float(file.vector("blk.0.attn_q_norm.weight", size)[0])
    for i in range(layers):
        for name, value in (("q", found), ("k", 1.0)):
            tensor = f"blk.{i}.attn_{name}_norm.weight"
            if (file.vector(tensor, size) != value).any():
                raise ConfigError(
                    f"tensor {tensor}", expected=f"{value:g} alone, the factor of all heads", found="others"
                )
    return float(f"{found:.6g}")  # as the float32 was written


GGUF = GgufFamily(
    "muse-glimmer",
    _complete_gguf,
    {
        **ATTENTION,
        **MLP,
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    interleaved=True,
    norm_offset=1.0,
    last_offset=0.0,
    folded=("attn_q_norm", "attn_k_norm"),
)
