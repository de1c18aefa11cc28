"""Granite 4 hybrids (IBM 2025): Granite with Mamba-2 in most layers, and experts beside one that all tokens use.

Models: Granite 4.0 H-Tiny, H-Small, H-Micro, H-1B, H-350M; Micro, 1B, 350M, which only attend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.models.granite import DEFAULTS, multiplied
from mlcpipe.models.granite import complete_gguf as complete_granite
from mlcpipe.models.granitemoe import NAMES as GRANITEMOE
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_kinds
from mlcpipe.nn.decoder import Mixer
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, SCAN, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.mamba2 import Mamba2, read_gguf, read_mamba2
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

NAMES = CheckpointNames(
    layer={**GRANITEMOE.layer, **{f"mlp.{x}_proj": f"shared_mlp.{x}_proj" for x in ("gate", "up", "down")}}
)
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "normalization_function": [None, "rmsnorm"],
    "hidden_act": [None, "silu"],
    "position_embedding_type": [None, "nope", "rope"],
    "sliding_window": [None],
    "mlp_bias": [None, False],
}
SCANS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Granite 4 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    scans = layer_kinds(fields, count, SCANS) or [True] * count
    inner = fields.integer("mamba_expand", 2, high=64) * base.hidden_size
    spec = read_mamba2(fields, base.hidden_size, inner, eps=base.norm.eps) if any(scans) else None

    def mixer(i: int, attention: AttentionSpec) -> AttentionSpec | Mixer:
        return Mixer("mamba", Mamba2(spec, i)) if spec and scans[i] else attention

    rotated = [fields.get("position_embedding_type") == "rope"] * count
    return multiplied(base, _mlp(base), mixer, rotated=rotated)


def _mlp(base: BaseConfig) -> Callable[[int], nn.Module]:
    """Experts beside one that all tokens use, or that one alone."""
    shared = base.fields.integer("shared_intermediate_size", 1024)
    if base.fields.get("num_local_experts") == 0:
        return lambda i: base.mlp(width=shared)
    routing = Routing(*expert_counts(base.fields, experts=8, chosen=2), normalize=True)
    return lambda i: SparseMoE(base.hidden_size, base.intermediate_size, routing, base.act, shared_width=shared)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_granite(file, config)
    heads = file.numbers("attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = ["attention" if count else "mamba" for count in heads]
    config["position_embedding_type"] = "nope"
    config["mamba_expand"], rest = divmod(read_gguf(file, config), config["hidden_size"])
    if rest:
        raise file.error("ssm.inner_size", f"a multiple of {config['hidden_size']}")
    config["num_local_experts"] = 0
    if file.integer("expert_count", 0):
        del config["num_local_experts"]
        read_experts(file, config)
    config["shared_intermediate_size"] = file.integer("expert_shared_feed_forward_length", config["intermediate_size"])


GGUF = GgufFamily(
    "granitehybrid", _complete_gguf, {**PRE_NORM, **MOE, **SCAN}, EXPERTS, interleaved=True, some_attend=True
)
