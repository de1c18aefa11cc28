"""Hunyuan mixtures of experts (Tencent 2025): Hunyuan with experts beside one that all tokens use.

Models: Hunyuan-A13B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.hunyuan_v1_dense import DEFAULTS, rope_with_alpha
from mlcpipe.models.hunyuan_v1_dense import FIXED as FIXED_DENSE
from mlcpipe.models.hunyuan_v1_dense import NAMES as DENSE
from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames

NAMES = CheckpointNames(layer={**DENSE.layer, "mlp.gate": "mlp.gate.wg", "mlp.shared_expert": "mlp.shared_mlp"})
FIXED: Mapping[str, list[Any]] = {name: values for name, values in FIXED_DENSE.items() if name != "num_experts"}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Hunyuan MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED, norm_topk_prob=[None, True])
    bias, width = base.fields.flag("attention_bias", False), base.intermediate_size
    routing = Routing(*expert_counts(base.fields, 1, 1), normalize=True)
    return decoder(
        base,
        base.attentions(qkv_bias=bias, o_bias=bias, norm="head", norm_after=True),
        lambda i: SparseMoE(base.hidden_size, width, routing, base.act, shared_width=width),
        ropes=[rope_with_alpha(base)],
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_experts(file, config)
    if (shared := file.integer("expert_shared_count", 1)) != 1:
        raise file.error("expert_shared_count", 1, shared)


GGUF = GgufFamily("hunyuan-moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
