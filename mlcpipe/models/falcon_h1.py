"""Falcon-H1 (TII 2025): attention and Mamba-2 side by side in each layer, with a multiplier for each part.

Models: Falcon-H1 0.5B, 1.5B, 3B, 7B, 34B; Falcon-H1-Tiny 90M.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import SideBySide
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile
from mlcpipe.nn.gguf import SCAN as GGUF_SCAN
from mlcpipe.nn.mamba2 import NAMES as SCAN
from mlcpipe.nn.mamba2 import Mamba2, Mamba2Spec, read_gguf, read_mamba2
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=8192, num_kv_heads=8, norm=NormSpec(eps=1e-5), intermediate_size=14336)
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={
        **{f"mixers.{name}": name for name in ("self_attn", "mamba")},
        "mlp": "feed_forward",
        "post_attention_layernorm": "pre_ff_layernorm",
    },
)
MULTIPLIERS = ("attention_in", "attention_out", "ssm_in", "ssm_out")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Falcon-H1 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, hidden_act=[None, "silu"], layer_types=[None])
    fields = base.fields
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    scale = base.head_dim**-0.5 * fields.number("key_multiplier", 1.0)
    attention, scan = base.attention(qkv_bias=bias, o_bias=bias, scale=scale), _scan(base)
    of = {name: fields.number(f"{name}_multiplier", 1.0) for name in MULTIPLIERS}

    def mixer(i: int) -> Mixer:
        attends = Attention(attention, i), of["attention_in"], of["attention_out"]
        return Mixer("mixers", SideBySide(self_attn=attends, mamba=(Mamba2(scan, i), of["ssm_in"], of["ssm_out"])))

    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    return decoder(
        base,
        [mixer(i) for i in range(base.num_layers)],
        lambda i: base.mlp(bias=mlp_bias, scales=(gate, down)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _scan(base: BaseConfig) -> Mamba2Spec:
    """The Mamba-2 of each layer."""
    fields, hidden = base.fields, base.hidden_size
    inner = fields.optional_integer("mamba_d_ssm", 1024) or fields.integer("mamba_expand", 2, high=64) * hidden
    before = fields.flag("mamba_norm_before_gate", True)
    norm = ("before" if before else "after") if fields.flag("mamba_rms_norm", False) else ""
    names = {**SCAN, "out_bias": ("projectors_bias", False)}
    scales = _multipliers(fields, "ssm_multipliers", 5)
    return read_mamba2(fields, hidden, inner, names=names, norm=norm, eps=base.norm.eps, scales=scales)


def _multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers, 1 where there is none."""
    listed = fields.get(name, [1.0] * count)
    if not isinstance(listed, list) or len(listed) != count:
        raise ConfigError(f"field {name}", where=fields.where, expected=f"{count} numbers", found=repr(listed)[:80])
    return tuple(Fields({name: one}, fields.where).number(name) for one in listed)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Multipliers are in the weights."""
    config["mamba_d_ssm"] = read_gguf(file, config)
    config["projectors_bias"] = "blk.0.ssm_out.bias" in file
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["mamba_rms_norm"] = "blk.0.ssm_norm.weight" in file
    config["mamba_norm_before_gate"] = False


_NORM = "post_attention_layernorm.weight"
_NAMES = {**PRE_NORM, **GGUF_SCAN}
GGUF = GgufFamily(
    "falcon-h1",
    _complete_gguf,
    {
        **{name: f"mixers.{of}" if of.startswith(("self_attn", "mamba")) else of for name, of in _NAMES.items()},
        **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), _NORM),  # llama.cpp writes the first
    },
)
