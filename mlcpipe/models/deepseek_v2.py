"""DeepSeek V2 (DeepSeek 2024): latent attention, and experts chosen by a softmax, beside ones that all tokens use.

Models: DeepSeek-V2 and V2.5, V2-Lite 16B-A2.4B, Coder-V2 and Coder-V2-Lite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.models.deepseek_v3 import latent_mixers, read_latent_base
from mlcpipe.models.glm4_moe import NAMES, grouped_routing, sparse_after
from mlcpipe.models.glm4_moe import complete_gguf as complete_glm4_moe
from mlcpipe.nn.base_config import Defaults
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, LATENT, MLP, MOE, GgufFamily, GgufFile, read_latent
from mlcpipe.nn.moe import Routing, expert_counts

__all__ = ["GGUF", "NAMES", "build"]

DEFAULTS = Defaults(positions=2048)
ROUTER: dict[str, list[Any]] = {"scoring_func": [None, "softmax"], "moe_layer_freq": [None, 1]}
GREEDY, BY_GROUP = "greedy", "group_limited_greedy"


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a DeepSeek-V2 config.json. Raises ConfigError for unsupported fields."""
    base = read_latent_base(
        config, DEFAULTS, ROUTER | {"norm_topk_prob": [None, False], "rope_interleave": [None, True]}
    )
    mixers = latent_mixers(base)
    shared = base.fields.integer("n_shared_experts", 2, low=0)
    mlp = sparse_after(base, _routing(base.fields), dense=0, shared=shared, width=1407)
    return decoder(base, mixers, mlp)


def _routing(fields: Fields) -> Routing:
    """Weights are scores as they are."""
    method = fields.get("topk_method", GREEDY)
    known = f"{GREEDY} or {BY_GROUP}"
    if method not in (GREEDY, BY_GROUP):
        raise ConfigError("field topk_method", where=fields.where, expected=known, found=repr(method))
    grouped = grouped_routing(fields, *expert_counts(fields, 64), normalize=False)
    grouped = replace(grouped, score="softmax", bias=False, normalize=False, epsilon=0.0, group_score="max")
    if method == GREEDY:
        fields.refuse(n_group=[None, 1])
    return grouped


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_latent(file, config)
    complete_glm4_moe(file, config, "softmax")
    config["topk_method"] = BY_GROUP if config["n_group"] > 1 else GREEDY


GGUF = GgufFamily("deepseek2", _complete_gguf, {**LATENT, **MLP, **MOE}, EXPERTS, latent=True)
