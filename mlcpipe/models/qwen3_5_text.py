"""Qwen 3.5 (Qwen team 2026): gated delta nets, and in every fourth layer attention with gates; part of a head rotates.

Models: the text of Qwen3.5 0.8B, 2B, 4B, 9B and 27B, Qwen3.6-27B, Qwen3.8-27B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gated_delta import DeltaSpec, GatedDelta
from mlcpipe.nn.gguf import ATTENTION, MLP, GgufFamily, GgufFile, read_drafts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=32768, num_kv_heads=4, head_dim=256, norm=NormSpec(offset=1.0))
MTP: Mapping[str, str] = {  # names of the layer that drafts
    "mtp.eh_proj": "mtp.fc",
    "mtp.enorm": "mtp.pre_fc_norm_embedding",
    "mtp.hnorm": "mtp.pre_fc_norm_hidden",
    "mtp.layer": "mtp.layers.0",
}
NAMES = CheckpointNames(prefixes=("model.", "model.language_model.", ""), unused=("mtp.",), top=MTP)
TILED = "linear_tiled_value_heads"  # of GGUF files: value heads that follow each other read different key heads
ATTENDS, LINEAR = "full_attention", "linear_attention"
KINDS = {ATTENDS: True, LINEAR: False}
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "hidden_act": [None, "silu"],
    "attn_output_gate": [None, True],
    "mamba_ssm_dtype": [None, "float32"],
    "mlp_bias": [None, False],
    "sliding_window": [None],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Qwen 3.5 text config.json. Raises ConfigError for unsupported fields."""
    return hybrid(read_base(config, DEFAULTS, **FIXED))


def hybrid(base: BaseConfig, mlp: Callable[[int], nn.Module] | None = None, **options: Any) -> CausalLM:
    """A model of layers with a gated delta net, which has `options` of DeltaSpec, or gated attention."""
    fields = base.fields
    bias = fields.flag("attention_bias", False)
    attention = base.attention(qkv_bias=bias, o_bias=bias, norm="head", gate="query")
    step = fields.integer("full_attention_interval", 4)
    delta = delta_spec(base, (16, 32, 128, 128), eps=base.norm.eps, **options)
    attends = layer_kinds(fields, base.num_layers, KINDS) or [(i + 1) % step == 0 for i in range(base.num_layers)]
    mixers = [attention if one else Mixer("linear_attn", GatedDelta(delta, i)) for i, one in enumerate(attends)]
    drafts = attention if fields.integer("mtp_num_hidden_layers", 0, low=0) == 1 else None
    return decoder(base, mixers, mlp, ropes=[base.rope(partial=0.25)], drafts=drafts)


def delta_spec(base: BaseConfig, sizes: tuple[int, int, int, int], **options: Any) -> DeltaSpec:
    """The delta net with these default sizes: key heads, value heads and their dimensions."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    found = [base.fields.integer(f"linear_{name}", size, high=4096) for name, size in zip(names, sizes)]
    key_heads, value_heads, key_dim, value_dim = found
    if value_heads % key_heads:
        expected = f"a multiple of {key_heads}"
        raise ConfigError("field linear_num_value_heads", where=base.fields.where, expected=expected, found=value_heads)
    taps = base.fields.integer("linear_conv_kernel_dim", 4, low=2, high=64)
    tiled = base.fields.flag(TILED, False)
    return DeltaSpec(base.hidden_size, key_heads, value_heads, key_dim, value_dim, taps, tiled=tiled, **options)


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF has of families like Qwen 3.5."""
    read_drafts(file, config)
    config["mtp_num_hidden_layers"] = config["num_nextn_predict_layers"]
    heads, inner = file.integer("ssm.time_step_rank"), file.integer("ssm.inner_size")
    if not heads or inner % heads:
        raise file.error("ssm.inner_size", f"a multiple of {heads} heads", inner)
    layers = range(min(config["num_hidden_layers"], 1024))
    config.update(
        linear_num_key_heads=file.integer("ssm.group_count"), linear_num_value_heads=heads,
        linear_key_head_dim=file.integer("ssm.state_size"), linear_value_head_dim=inner // heads,
        linear_conv_kernel_dim=file.integer("ssm.conv_kernel"),
        layer_types=[ATTENDS if f"blk.{i}.attn_q.weight" in file else LINEAR for i in layers],
        attention_bias=any(f"blk.{i}.attn_q.bias" in file for i in layers), **{TILED: True},
    )  # fmt: skip


DELTAS = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GGUF = GgufFamily("qwen35", complete_gguf, DELTAS, rope="partial", norm_offset=1.0)
