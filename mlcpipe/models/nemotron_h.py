"""Nemotron-H (NVIDIA 2025): each layer is one block: Mamba-2, attention without RoPE, an MLP, or experts without gates.

Models: Nemotron-H 4B, 8B, 47B, 56B; Nemotron Nano 9B and 12B v2; Nemotron 3 Nano 4B, 30B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.models.glm4_moe import grouped_routing
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import MIXER_ALONE, MLP_ALONE
from mlcpipe.nn.gguf import ATTENTION, EXPERTS, MOE, PLAIN_MLP, GgufFamily, GgufFile, read_drafts, read_experts
from mlcpipe.nn.gguf import SCAN as GGUF_SCAN
from mlcpipe.nn.mamba2 import Mamba2, read_gguf, read_mamba2
from mlcpipe.nn.moe import SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=4096,
    num_kv_heads=8,
    head_dim=128,
    norm=NormSpec(eps=1e-5),
    act="relu2",
    intermediate_size=21504,
    names={"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"},
)
NAMES = CheckpointNames(
    prefixes=("backbone.", "model."),
    unused=("mtp.",),
    top={"embed_tokens": "embeddings", "norm": "norm_f"},
    layer={
        **dict.fromkeys(("mamba", "self_attn", "mlp"), "mixer"),
        "mlp.shared_expert": "mixer.shared_experts",
    },
)
SCAN: Mapping[str, tuple[str, int | bool]] = {
    "heads": ("mamba_num_heads", 128),
    "state_size": ("ssm_state_size", 128),
    "groups": ("n_groups", 8),
    "taps": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
    "out_bias": ("use_bias", False),
}
# Blocks by their letters in `hybrid_override_pattern` and their names in `layers_block_type`.
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
KINDS = {**{kind: kind for kind in LETTERS.values()}, "linear_attention": "mamba", "full_attention": "attention"}
FIXED: Mapping[str, list[Any]] = {
    "sliding_window": [None],
    "mamba_hidden_act": [None, "silu"],
    "attention_bias": [None, False],
    "moe_latent_size": [None],
    "residual_in_fp32": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Nemotron-H config.json. Raises ConfigError for unsupported fields."""
    kinds = _kinds(Fields(config))
    if kinds and not {"mamba", "attention"} & set(kinds):
        raise ConfigError("kinds of layers", where="config.json", expected="one of mamba or attention", found=kinds[0])
    base = read_base(config, replace(DEFAULTS, num_layers=len(kinds)), **FIXED)
    fields = base.fields
    fields.refuse(attention_head_dim=[None, base.head_dim], num_hidden_layers=[None, len(kinds)])
    attention = base.attention()
    inner = fields.integer("mamba_num_heads", 128) * fields.integer("mamba_head_dim", 64)
    scan = read_mamba2(fields, base.hidden_size, inner, "mamba_head_dim", SCAN, eps=base.norm.eps)

    def mixer(i: int) -> AttentionSpec | Mixer | None:
        if kinds[i] == "mamba":
            return Mixer("mamba", Mamba2(scan, i))
        return attention if kinds[i] == "attention" else None

    forms = [MIXER_ALONE if kind in ("mamba", "attention") else MLP_ALONE for kind in kinds]
    blocks = [mixer(i) for i in range(len(kinds))]
    return decoder(base, blocks, lambda i: _mlp(base, kinds[i]), form=forms, rotated=[False] * len(kinds))


def _kinds(fields: Fields) -> list[str]:
    """What each layer is."""
    for name in ("layers_block_type", "layer_types"):
        types = fields.get(name)
        if types is not None:
            return layer_kinds(fields, len(types) if isinstance(types, list) else 0, KINDS, name=name) or []
    pattern = fields.get("hybrid_override_pattern", "M*E-")
    if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS) or len(pattern) > 1024:
        expected = f"letters of {''.join(LETTERS)}"
        raise ConfigError("field hybrid_override_pattern", where=fields.where, expected=expected)
    return [LETTERS[one] for one in pattern]


def _mlp(base: BaseConfig, kind: str) -> nn.Module | None:
    """The MLP of a layer of this kind, or its experts."""
    fields = base.fields
    if kind == "mlp":
        return base.plain_mlp(fields.flag("mlp_bias", False))
    if kind != "moe":
        return None
    fields.refuse(mlp_bias=[None, False])
    routing = grouped_routing(fields, *expert_counts(fields, 8, 2), normalize=True)
    width, shared = (fields.integer(f"moe_{name}intermediate_size", 7688) for name in ("", "shared_expert_"))
    return SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared, gated=False)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_drafts(file, config)
    count, blocks = config["num_hidden_layers"], file.integer("block_count")
    attend, feed = (file.numbers(key, blocks)[:count] > 0 for key in ("attention.head_count_kv", "feed_forward_length"))
    experts = file.integer("expert_count", 0)
    feeds = "moe" if experts else "mlp"
    config["layers_block_type"] = [
        "attention" if one else feeds if other else "mamba" for one, other in zip(attend, feed)
    ]
    inner = read_gguf(file, config, SCAN)
    config["mamba_head_dim"] = inner // max(1, config["mamba_num_heads"])
    config["mlp_bias"] = any(f"blk.{i}.ffn_up.bias" in file for i in range(min(count, 1024)))
    if experts:
        read_experts(file, config, "sigmoid")
        config["moe_shared_expert_intermediate_size"] = file.integer("expert_shared_feed_forward_length")
        file.integer("expert_shared_count", 1)
        config["routed_scaling_factor"] = file.number("expert_weights_scale", 0.0) or 1.0
        config["norm_topk_prob"] = bool(file.get("expert_weights_norm", False))
        config["n_group"] = max(file.integer("expert_group_count", 1), 1)
        config["topk_group"] = max(file.integer("expert_group_used_count", 1), 1)


GGUF = GgufFamily(
    "nemotron_h_moe",
    _complete_gguf,
    {**ATTENTION, **PLAIN_MLP, **MOE, **GGUF_SCAN, "attn_norm": "norm"},
    {name: EXPERTS[name] for name in ("ffn_up_exps", "ffn_down_exps")},
    some_attend=True,
    also=("nemotron_h",),
)
