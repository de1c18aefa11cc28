"""DeepSeek V3 (DeepSeek 2024): latent attention, and experts chosen by biased sigmoids, beside ones that all use.

Models: DeepSeek V3, V3.1 and R1; Kimi K2; Moonlight 16B-A3B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mlcpipe.models.glm4_moe import NAMES, drafts_itself, grouped_routing, sparse_after
from mlcpipe.models.glm4_moe import complete_gguf as complete_glm4_moe
from mlcpipe.nn.base_config import BaseConfig, Defaults, check_heads, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows, rope_table
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.gguf import EXPERTS, LATENT, MLP, MOE, GgufFamily, GgufFile, read_drafts, read_latent
from mlcpipe.nn.latent_attention import LatentAttention, LatentSpec
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.rope import yarn_attention

__all__ = ["GGUF", "NAMES", "build"]

DEFAULTS = Defaults(positions=4096)
ROUTER: Mapping[str, list[Any]] = {
    "scoring_func": [None, "sigmoid"], "topk_method": [None, "noaux_tc"], "moe_layer_freq": [None, 1],
}  # fmt: skip
_NEUTRAL: Mapping[str, list[Any]] = {"mlp_bias": [None, False], "sliding_window": [None], "index_topk": [None]}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a DeepSeek-V3 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(config, DEFAULTS, ROUTER)
    fields = base.fields
    mixers = latent_mixers(base)
    routing = grouped_routing(fields, *expert_counts(fields, 256, 8), normalize=True, groups=(8, 4), scale=2.5)
    shared = fields.integer("n_shared_experts", 1, low=0)
    return decoder(
        base, mixers, sparse_after(base, routing, dense=3, shared=shared, width=2048), drafts=draft_of(base, mixers)
    )


def read_latent_base(
    config: Mapping[str, Any],
    defaults: Defaults,
    neutral: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    *,
    nope: int = 128,
    rope: int = 64,
    head_dims: Sequence[int] = (),
) -> BaseConfig:
    """The shared fields; `head_dim` is that of the rotated part of heads. Raises ConfigError.

    `nope` and `rope` are the family's default sizes; `head_dims`: files may say these of other heads.
    """
    base = read_base(config, defaults, **_NEUTRAL, **neutral)
    fields, rotated = base.fields, base.fields.integer("qk_rope_head_dim", rope, low=2, high=1024)
    whole = rotated + fields.integer("qk_nope_head_dim", nope, high=1024)
    sizes = [None, rotated, whole, base.hidden_size // base.num_heads, *head_dims]
    fields.refuse(num_key_value_heads=[None, base.num_heads], head_dim=sizes)
    check_heads(fields, base.num_heads, 1, "num_attention_heads")
    return replace(base, head_dim=rotated)


def latent_mixers(base: BaseConfig, **options: Any) -> list[Mixer]:
    """The attention of all layers, with options of `latent_spec`. Raises ConfigError."""
    layer_windows(base.fields, None, [False] * base.num_layers, fixed=True)
    spec = latent_spec(base, **options)
    return [Mixer("self_attn", LatentAttention(spec, i)) for i in range(base.num_layers)]


def latent_spec(
    base: BaseConfig, *, kv_rank: int = 512, q_rank: int | None = 1536, nope: int = 128, value: int = 128,
    interleaved: bool = True, rope: Mapping[str, Any] | None = None, **options: Any,
) -> LatentSpec:  # fmt: skip
    """What config.json says of latent attention; the sizes are the family's defaults. Raises ConfigError.

    `rope` is the rope dictionary, if it is not that of config.json; `options` are others of LatentSpec.
    """
    fields = base.fields
    table = Fields(rope_table(fields) if rope is None else rope, "config.json rope_parameters")
    nope = fields.integer("qk_nope_head_dim", nope, high=1024)
    scale = (nope + base.head_dim) ** -0.5
    grown = table.number("mscale_all_dim", 0.0, low=0.0)
    if grown and table.get("rope_type", table.get("type", "default")) != "default":
        scale *= yarn_attention(table.number("factor", low=1e-6), grown) ** 2
    return LatentSpec(
        base.hidden_size, base.num_heads, nope, base.head_dim, fields.integer("v_head_dim", value, high=1024),
        fields.integer("kv_lora_rank", kv_rank, high=4096), fields.optional_integer("q_lora_rank", q_rank), scale,
        fields.flag("attention_bias", False), interleaved and fields.flag("rope_interleave", True), **options,
    )  # fmt: skip


def draft_of(base: BaseConfig, mixers: Sequence[Mixer]) -> Mixer | None:
    """The attention of the layer that drafts, if checkpoints have one: as that of the layers that attend."""
    latent = [one.block.latent for one in mixers if isinstance(one.block, LatentAttention)]
    return Mixer("self_attn", LatentAttention(latent[0], 0)) if latent and drafts_itself(base) else None


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_drafts(file, config)
    read_latent(file, config)
    complete_glm4_moe(file, config)


GGUF = GgufFamily(
    "deepseek2", _complete_gguf, {**LATENT, **MLP, **MOE}, EXPERTS, latent=True,
    applies=lambda file: file.integer("expert_gating_func", 1) == 2,
)  # fmt: skip
