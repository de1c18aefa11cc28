"""dots.llm1 (rednote 2025): GLM 4.5's mixtures, norms of heads and whole ones rotated; upper layers may have a window.

Models: dots.llm1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.glm4_moe import NAMES, grouped_routing, sparse_after
from mlcpipe.models.glm4_moe import complete_gguf as complete_glm4_moe
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile
from mlcpipe.nn.moe import expert_counts

__all__ = ["GGUF", "NAMES", "build"]

DEFAULTS = Defaults(positions=2048, num_kv_heads=32)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a dots.llm1 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    fields = base.fields
    bias, window = fields.flag("attention_bias", False), fields.optional_integer("sliding_window", 4096)
    full = fields.integer("max_window_layers", 62, low=0)
    windows = layer_windows(fields, window, [window is not None and i >= full for i in range(base.num_layers)])
    routing = grouped_routing(fields, *expert_counts(fields), normalize=False)
    mlp = sparse_after(base, routing, dense=0, shared=fields.integer("n_shared_experts", 0, low=0))
    return decoder(base, base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="head"), mlp)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_glm4_moe(file, config)
    config["sliding_window"] = None


GGUF = GgufFamily("dots1", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
