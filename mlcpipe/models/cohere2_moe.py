"""Cohere 2 mixtures of experts (Cohere 2025): attention beside experts; full layers have no rope, dense ones may.

Models: Command A mixtures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn

from mlcpipe.errors import ConfigError
from mlcpipe.models.cohere2 import (
    DEFAULT_LOGIT_SCALE,
    DEFAULT_PATTERN,
    DEFAULT_WINDOW,
    DEFAULTS,
    FIXED,
    complete_gguf,
)
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_drafts, read_experts, read_windows
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

LAYER_NORM = replace(DEFAULTS, head_dim=128)
RMS_NORM = replace(LAYER_NORM, norm=NormSpec(), names={})
NAMES = CheckpointNames(layer={"mlp.shared_expert": "mlp.shared_experts"})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Cohere 2 MoE config.json. Raises ConfigError for unsupported fields."""
    defaults = LAYER_NORM if config.get("rms_norm_eps") is None else RMS_NORM
    base = read_base(config, defaults, **FIXED, use_qk_norm=[None, False])
    fields, bias = base.fields, base.fields.flag("attention_bias", False)
    first = fields.integer("first_k_dense_replace", 0, low=0)
    pattern = fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
    of_dense = fields.integer("prefix_dense_sliding_window_pattern", 1)
    places = [(i + 1, of_dense) if i < first else (i - first + 1, pattern) for i in range(base.num_layers)]
    window = fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    windows = layer_windows(fields, window, [place % period != 0 for place, period in places])
    dense = _dense_layers(base, first)
    return decoder(
        base,
        base.attentions(windows, qkv_bias=bias, o_bias=bias, interleaved=base.head_dim),
        lambda i: _mlp(base, dense[i]),
        form=PARALLEL,
        rotated=[one is not None or (plain and of_dense == 1) for one, plain in zip(windows, dense)],
        logit_scale=fields.number("logit_scale", DEFAULT_LOGIT_SCALE),
    )


def _dense_layers(base: BaseConfig, first: int) -> list[bool]:
    """Whether each layer has no experts, by `mlp_layer_types`, else the first ones."""
    stated = base.fields.get("mlp_layer_types")
    types = ["dense" if i < first else "sparse" for i in range(base.num_layers)] if stated is None else stated
    if not isinstance(types, list) or len(types) != base.num_layers or any(t not in ("dense", "sparse") for t in types):
        expected = f"{base.num_layers} of dense, sparse"
        raise ConfigError("field mlp_layer_types", where=base.fields.where, expected=expected, found=stated)
    return [one == "dense" for one in types]


def _mlp(base: BaseConfig, dense: bool) -> nn.Module:
    fields, width = base.fields, base.intermediate_size
    if dense:
        return base.mlp(width=fields.integer("prefix_dense_intermediate_size", width))
    counts, shared = expert_counts(fields, 8, 2), fields.integer("num_shared_experts", 0, low=0, high=4096) * width
    average = _one_of(fields, "shared_expert_combination_strategy", "average", "sum") == "average" and shared
    score = _one_of(fields, "expert_selection_fn", "softmax", "sigmoid")
    scale, normalize = 0.5 if average else 1.0, score == "softmax" or fields.flag("norm_topk_prob", True)
    routing = Routing(*counts, score, normalize=normalize, scale=scale)
    return SparseMoE(base.hidden_size, width, routing, base.act, shared_width=shared, shared_scale=scale)


def _one_of(fields: Fields, name: str, default: Any, *others: str) -> Any:
    value = fields.get(name, default)
    if value not in (default, *others):
        expected = " or ".join((default, *others))
        raise ConfigError(f"field {name}", where=fields.where, expected=expected, found=repr(value))
    return value


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    sigmoid = file.integer("expert_gating_func", 2) == 2
    complete_gguf(file, config)
    read_experts(file, config, "sigmoid" if sigmoid else "softmax")
    read_drafts(file, config)
    read_windows(file, config, DEFAULT_PATTERN)
    config["expert_selection_fn"] = "sigmoid" if sigmoid else "softmax"
    config["norm_topk_prob"] = bool(file.get("expert_weights_norm", False))
    config["first_k_dense_replace"] = file.integer("leading_dense_block_count", 0)
    config["num_shared_experts"] = file.integer("expert_shared_count", 0)
    config["prefix_dense_intermediate_size"] = config["intermediate_size"]
    config["intermediate_size"] = config["moe_intermediate_size"]
    if file.get("attention.layer_norm_epsilon") is not None:
        config["layer_norm_eps"] = config.pop("rms_norm_eps")


GGUF = GgufFamily("cohere2moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
