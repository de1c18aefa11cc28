"""Kimi Linear (Moonshot AI 2025): delta nets whose channels decay on their own, latent attention without RoPE, experts.

Models: Kimi-Linear-48B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.deepseek_v3 import ROUTER, latent_spec, read_latent_base
from mlcpipe.models.glm4_moe import grouped_routing
from mlcpipe.models.glm4_moe_lite import sparse_where_listed
from mlcpipe.models.mixtral import PARTS
from mlcpipe.models.qwen3_5_text import KINDS
from mlcpipe.nn.base_config import BaseConfig, Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gated_delta import DeltaSpec, GatedDelta
from mlcpipe.nn.latent_attention import LatentAttention, LatentSpec
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=1048576, norm=NormSpec(eps=1e-5))
DELTA = {"self_attn.norm": "self_attn.o_norm", "self_attn.out_proj": "self_attn.o_proj"}
_EXPERTS = "block_sparse_moe"
NAMES = CheckpointNames(
    layer={
        **DELTA,
        "mlp.gate": f"{_EXPERTS}.gate",
        "mlp.shared_expert": f"{_EXPERTS}.shared_experts",
        **{f"mlp.experts.{{}}.{x}_proj": f"{_EXPERTS}.experts.{{}}.{w}" for x, w in PARTS.items()},
    },
    also={".mlp.": f".{_EXPERTS}."},  # as transformers saves dense ones
)
# What files call these fields.
ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
FIXED: Mapping[str, Sequence[Any]] = {
    **ROUTER,
    "hidden_act": [None, "silu"],
    "mla_use_nope": [None, True],
    "moe_router_activation_func": [None, "sigmoid"],
    "use_grouped_topk": [None, True],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Kimi Linear config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(renamed(config), DEFAULTS, FIXED)
    fields, count = base.fields, base.num_layers
    own = Fields(fields.table("linear_attn_config"), "config.json linear_attn_config")
    heads = own.integer("num_heads", fields.integer("linear_num_heads", 32), high=4096)
    dim = own.integer("head_dim", fields.integer("linear_head_dim", 128), high=1024)
    taps = own.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4), low=2, high=64)
    delta = channel_delta(base, (heads, dim, taps), z="g_a_proj", a="f_a_proj", rank=dim)
    attends = layer_kinds(fields, count, KINDS) or _listed(own, count)
    latent = latent_spec(base, q_rank=None, interleaved=False, rope={})
    routing = grouped_routing(fields, *expert_counts(fields, 256, 8), normalize=True, scale=2.446)
    shared = fields.integer("n_shared_experts", 1, low=0)
    mlp = sparse_where_listed(base, routing, dense=1, shared=shared, width=1024)
    return decoder(base, mixers(attends, latent, delta), mlp, rotated=[False] * count)


def _listed(own: Fields, count: int) -> list[bool]:
    """Whether each layer attends, by the numbers of layers from 1 that `linear_attn_config` lists."""
    full = own.get("full_attn_layers")
    if full is None:
        own.refuse(kda_layers=[None])
        return [i > 0 and i % 4 == 0 for i in range(count)]
    if not isinstance(full, list) or not all(type(one) is int and 0 < one <= count for one in full):
        expected = f"a list of layers from 1 to {count}"
        raise ConfigError("field full_attn_layers", where=own.where, expected=expected, found=repr(full)[:80])
    own.refuse(kda_layers=[None, [i + 1 for i in range(count) if i + 1 not in full]])
    return [i + 1 in full for i in range(count)]


def mixers(attends: Sequence[bool], latent: LatentSpec, delta: DeltaSpec) -> list[Mixer]:
    """What mixes tokens in each layer."""
    blocks = (LatentAttention(latent, i) if one else GatedDelta(delta, i) for i, one in enumerate(attends))
    return [Mixer("self_attn", block) for block in blocks]


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as other families call them. Raises ConfigError for one that has two names and two values."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        known = ALIASES.get(name, name)
        if found.setdefault(known, value) != value:
            values = f"{found[known]!r} and {value!r}"[:80]
            raise ConfigError(f"field {known} has two names", where="config.json", expected="one value", found=values)
    return found


def channel_delta(base: BaseConfig, sizes: tuple[int, int, int], *, z: str, a: str, **options: Any) -> DeltaSpec:
    """The delta net of these heads, dimensions and taps; `z` and `a` are the matrices that make its gates."""
    heads, dim, taps = sizes
    return DeltaSpec(
        base.hidden_size, heads, heads, dim, dim, taps, base.norm.eps, (*(f"{x}_proj" for x in "qkv"), z, a),
        ("b_proj",), tuple(f"{x}_conv1d" for x in "qkv"), channelwise=True, gate="sigmoid", **options,
    )  # fmt: skip
