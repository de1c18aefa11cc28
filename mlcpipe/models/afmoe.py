"""AFMoE, Trinity (Arcee 2025): gated attention, rotary in sliding layers alone, experts chosen by biased sigmoids.

Models: Trinity Nano, Trinity Mini.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import LayerForm
from mlcpipe.nn.gguf import ATTENTION, EXPERTS, MLP, MOE, GgufFamily, GgufFile, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=16384, head_dim=128, norm=NormSpec(eps=1e-5))
FORM = LayerForm("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
NAMES = CheckpointNames(
    layer={
        "mlp.gate": "mlp.router.gate",
        "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    }
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an AFMoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False], score_func=[None, "sigmoid"], route_norm=[None, True])
    fields, count = base.fields, base.num_layers
    window, every = fields.integer("sliding_window", 1024), fields.integer("global_attn_every_n_layers", 4)
    windows = layer_windows(fields, window, [(i + 1) % every != 0 for i in range(count)])
    bias = fields.flag("attention_bias", False)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="head", gate="element")
    routing = Routing(
        *expert_counts(fields, 64, 6), "sigmoid", normalize=True, epsilon=1e-20,
        scale=fields.number("route_scale", 1.0), bias=True,
    )  # fmt: skip
    width, dense = fields.integer("moe_intermediate_size", 1408), fields.integer("num_dense_layers", 1, low=0)
    shared = fields.integer("num_shared_experts", 2, high=4096) * width

    def mlp(i: int) -> nn.Module:
        return base.mlp() if i < dense else SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared)

    scale = base.hidden_size**0.5 if fields.flag("mup_enabled", False) else 1.0
    rotated = [one is not None for one in windows]
    return decoder(base, specs, mlp, form=FORM, rotated=rotated, embedding_scale=scale)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_experts(file, config, "sigmoid")
    config["num_dense_layers"] = file.integer("leading_dense_block_count", 0)
    config["num_shared_experts"] = file.integer("expert_shared_count")
    config["route_scale"] = file.number("expert_weights_scale", 0.0) or 1.0
    config["sliding_window"] = file.integer("attention.sliding_window")
    config["route_norm"] = file.get("expert_weights_norm", True)
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["mup_enabled"] = True  # as llama.cpp, whose files do not say so


GGUF = GgufFamily(
    "afmoe",
    _complete_gguf,
    {
        **ATTENTION,
        **MLP,
        **MOE,
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    EXPERTS,
)
