"""LLaDA 2 (inclusionAI 2025): Ling 2 that denoises blocks: grouped experts, norms of heads, half of each rotated.

Models: LLaDA2.0-mini 16B-A1.4B, LLaDA2.0-flash; LLaDA2.1-mini and flash, which also edit tokens of a block. Their files
do not tell the two apart: `editing_threshold` in config.json, or a request's, switches edits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.diffusion.sdar import denoising
from mlcpipe.models.glm4_moe import grouped_routing, sparse_after
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = Defaults(positions=16384, num_kv_heads=4, theta=6e5)
NAMES = CheckpointNames(
    top={"embed_tokens": "word_embeddings"},
    layer={
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    },
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a LLaDA 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config, DEFAULTS, score_function=[None, "sigmoid"], moe_router_enable_expert_bias=[None, True],
        use_sliding_window=[None, False], norm_topk_prob=[None, True], use_qk_norm=[None, True],
    )  # fmt: skip
    fields = base.fields
    qkv, o = fields.flag("use_qkv_bias", False), fields.flag("use_bias", False)
    specs = base.attentions(qkv_bias=qkv, o_bias=o, norm="head", fused="parts")
    routing = grouped_routing(fields, *expert_counts(fields, 256, 8), normalize=True, groups=(8, 4), scale=2.5)
    shared = fields.integer("num_shared_experts", 1, low=0)
    mlp = sparse_after(base, routing, dense=1, shared=shared, width=512)
    model = decoder(base, specs, mlp, ropes=[base.rope(partial=0.5)])
    return denoising(model, fields, mask=156895, block=32, threshold=0.95)
