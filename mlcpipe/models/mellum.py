"""Mellum 2 (JetBrains 2026): Qwen 3's mixtures, with windows and a second rope in the layers that have them.

The layer that drafts slides and has a mixture unless config.json says otherwise, as in transformers; files that have it
need not say so.

Models: Mellum2 12B-A2.5B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.glm4_moe_lite import dense_after, sparse_where_listed
from mlcpipe.models.laguna import ropes_of_kinds
from mlcpipe.models.qwen3_5_text import MTP
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import SLIDES, layer_kinds, layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_experts, read_windows
from mlcpipe.nn.moe import Routing, expert_counts
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = Defaults(positions=131072, num_kv_heads=4, head_dim=128, intermediate_size=7168)
NAMES = CheckpointNames(unused=("mtp.",), top=MTP)
ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mellum 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False], rope_scaling=[None], use_sliding_window=[None, True])
    fields, count = base.fields, base.num_layers
    bias = fields.flag("attention_bias", False)
    window = fields.optional_integer("sliding_window", 1024)
    windows = layer_windows(fields, window, [False] * count)
    routing = Routing(*expert_counts(fields, 64, 8), normalize=fields.flag("norm_topk_prob", True))
    mlp = sparse_where_listed(base, routing, dense=0, shared=0, width=896)
    slides, dense = window is not None, False
    drafts = fields.integer("num_nextn_predict_layers", 1, low=0, high=64) == 1
    if drafts:
        [slides] = layer_kinds(fields, 1, SLIDES, name="mtp_layer_types") or [slides]
        [dense] = layer_kinds(fields, 1, {"dense": True, "sparse": False}, name="mtp_mlp_layer_types") or [dense]
    specs = base.attentions([*windows, window if slides else None], qkv_bias=bias, o_bias=bias, norm="head")
    return decoder(
        base,
        specs[:count],
        dense_after(base, mlp) if dense else mlp,
        ropes=ropes_of_kinds(base, ROPES),
        rope_of=[*(0 if one is None else 1 for one in windows), int(slides)],
        drafts=specs[count] if drafts else None,
    )


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """All layers have experts. The scaling of rope is that of full layers alone."""
    read_experts(file, config)
    read_windows(file, config, 4)
    theta, full = config.pop("rope_theta"), config.pop("rope_scaling", None) or {"rope_type": "default"}
    config |= {
        "attention_bias": "blk.0.attn_q.bias" in file,
        "mlp_layer_types": ["sparse"] * len(config["layer_types"]),
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", theta)},
        },
    }


GGUF = GgufFamily("mellum", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
