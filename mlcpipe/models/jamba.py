"""Jamba (AI21 2024): Mamba in most layers, attention without RoPE in every eighth, experts in every second.

Models: Jamba Reasoning 3B; Jamba Mini and Large 1.5 to 1.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.mamba import rank_of
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gguf import CHANNEL_SCAN, EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.mamba import Mamba, MambaSpec
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = Defaults(positions=262_144, num_kv_heads=8, intermediate_size=14336)
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={"mlp": "feed_forward", "mlp.gate": "feed_forward.router", "post_attention_layernorm": "pre_ff_layernorm"},
)
FIXED: Mapping[str, list[Any]] = {
    "hidden_act": [None, "silu"],
    "layer_types": [None],
    "sliding_window": [None],
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Jamba config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, hidden, count = base.fields, base.hidden_size, base.num_layers
    spec = MambaSpec(
        hidden,
        fields.integer("mamba_expand", 2, high=64) * hidden,
        fields.integer("mamba_d_state", 16, high=1024),
        rank_of(fields, "mamba_dt_rank", hidden),
        fields.integer("mamba_d_conv", 4, low=2, high=64),
        fields.flag("mamba_conv_bias", True),
        fields.flag("mamba_proj_bias", False),
        base.norm,
    )
    attends, sparse = (
        _every(base.fields, f"{part}_layer_period", f"{part}_layer_offset", *default, count)
        for part, default in (("attn", (8, 4)), ("expert", (2, 1)))
    )
    routing = Routing(*expert_counts(fields, 16, 2))

    def mlp(i: int) -> nn.Module:
        if not sparse[i] or routing.experts == 1:
            return base.mlp()
        return SparseMoE(hidden, base.intermediate_size, routing, base.act)

    mixers = [base.attention() if attends[i] else Mixer("mamba", Mamba(spec, i)) for i in range(count)]
    return decoder(base, mixers, mlp, rotated=[False] * count)


def _every(fields: Any, period: str, offset: str, default: int, first: int, count: int) -> list[bool]:
    """Which layers are the `offset`-th of each `period`."""
    every = fields.integer(period, default)
    at = fields.integer(offset, first, low=0, high=every - 1)
    return [i % every == at for i in range(count)]


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    attends = (file.numbers("attention.head_count_kv", count) > 0).nonzero()[0].tolist()
    sparse = [i for i in range(min(count, 1024)) if f"blk.{i}.ffn_gate_inp.weight" in file]
    for name, layers in (("attn", attends), ("expert", sparse)):
        period = layers[1] - layers[0] if len(layers) > 1 else count
        config[f"{name}_layer_period"], config[f"{name}_layer_offset"] = period, layers[0] if layers else 0
        if not layers or [i for i in range(count) if i % period == layers[0]] != layers:
            raise file.error("attention.head_count_kv", f"layers at equal distances, for {name}", layers[:8])
    config["mamba_expand"], rest = divmod(file.integer("ssm.inner_size"), hidden)
    if rest:
        raise file.error("ssm.inner_size", f"a multiple of {hidden}")
    keys = {"mamba_dt_rank": "time_step_rank", "mamba_d_state": "state_size", "mamba_d_conv": "conv_kernel"}
    config.update({name: file.integer(f"ssm.{key}") for name, key in keys.items()})
    scan = next(i for i in range(count + 1) if i not in attends)
    config["mamba_conv_bias"] = f"blk.{scan}.ssm_conv1d.bias" in file
    config["mamba_proj_bias"] = f"blk.{scan}.ssm_in.bias" in file
    read_experts(file, config)


GGUF = GgufFamily("jamba", _complete_gguf, {**PRE_NORM, **MOE, **CHANNEL_SCAN}, EXPERTS, some_attend=True)
