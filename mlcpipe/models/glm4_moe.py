"""GLM 4.5 to 4.7 (Z.ai 2025): experts chosen by biased sigmoids, beside ones that all tokens use; half heads rotate.

Models: GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, EXPERTS, MLP, MOE, POST_NORMS, GgufFamily, GgufFile, read_drafts, read_experts
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=8, norm=NormSpec(eps=1e-5))
NAMES = CheckpointNames(layer={"mlp.shared_expert": "mlp.shared_experts"})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM 4 MoE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False])
    fields = base.fields
    norm = "head" if fields.flag("use_qk_norm", False) else ""
    specs = base.attentions(qkv_bias=fields.flag("attention_bias", False), norm=norm)
    routing = grouped_routing(fields, *expert_counts(fields, 128, 8), normalize=True)
    mlp = sparse_after(base, routing, dense=1, shared=fields.integer("n_shared_experts", 1, low=0))
    return decoder(base, specs, mlp, ropes=[base.rope(partial=0.5)], drafts=specs[-1] if drafts_itself(base) else None)


def drafts_itself(base: BaseConfig) -> bool:
    """Whether checkpoints have a layer that drafts; several of them, one for each token, are left out."""
    return base.fields.integer("num_nextn_predict_layers", 0, low=0) == 1


def grouped_routing(
    fields: Fields, experts: int, chosen: int, *, normalize: bool, groups: tuple[int, int] = (1, 1), scale: float = 1.0
) -> Routing:
    """DeepSeek-V3's router (Liu et al. 2024). Raises ConfigError for groups that do not hold the chosen experts.

    The family's defaults: `groups` of groups and of those that are chosen, `scale` of `routed_scaling_factor`.
    """
    count = fields.integer("n_group", groups[0], high=experts)
    top = fields.integer("topk_group", groups[1], high=count)
    if experts % count or (count > 1 and experts < 2 * count) or chosen > top * (experts // count):
        expected = f"equal groups of {experts} experts with {chosen} in {top}"
        raise ConfigError("field n_group", where=fields.where, expected=expected, found=count)
    return Routing(
        experts, chosen, "sigmoid", normalize=fields.flag("norm_topk_prob", normalize), epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", scale), bias=True, groups=count, top_groups=top,
    )  # fmt: skip


def sparse_after(
    base: BaseConfig, routing: Routing, *, dense: int, shared: int, width: int = 1408
) -> Callable[[int], nn.Module]:
    """The MLP of each layer: `first_k_dense_replace` dense ones, by default `dense`, then mixtures.

    `width`: by default of an expert; `shared` as many widths as the one has that all tokens use.
    """
    first, sparse = base.fields.integer("first_k_dense_replace", dense, low=0), mixture(base, routing, shared, width)
    return lambda i: base.mlp() if i < first else sparse()


def mixture(base: BaseConfig, routing: Routing, shared: int, width: int) -> Callable[[], nn.Module]:
    """What makes the experts of a layer; the sizes are as those of `sparse_after`."""
    width = base.fields.integer("moe_intermediate_size", width)
    return lambda: SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared * width)


def complete_gguf(file: GgufFile, config: dict[str, Any], score: Literal["softmax", "sigmoid"] = "sigmoid") -> None:
    """The fields of config.json that GGUF has of families like GLM 4 MoE, whose router has that `score`."""
    read_experts(file, config, score)
    config["attention_bias"] = "blk.0.attn_q.bias" in file
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file
    config["n_shared_experts"] = file.integer("expert_shared_count")
    config["first_k_dense_replace"] = file.integer("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = file.number("expert_weights_scale", 0.0) or 1.0
    config["norm_topk_prob"] = bool(file.get("expert_weights_norm", False))
    config["n_group"] = max(file.integer("expert_group_count", 1), 1)
    config["topk_group"] = max(file.integer("expert_group_used_count", 1), 1)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_drafts(file, config)


GGUF = GgufFamily("glm4moe", _complete_gguf, {**ATTENTION, **MLP, **MOE, **POST_NORMS}, EXPERTS, rope="partial")
