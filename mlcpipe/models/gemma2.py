"""Gemma 2 (Gemma Team 2024): norms around attention and MLP, soft caps, a window in every second layer.

Models: Gemma 2 2B, 9B, 27B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import SANDWICH_NORM, LayerForm
from mlcpipe.nn.gguf import ATTENTION, MLP, POST_NORMS, GgufFamily, GgufFile, read_windows
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=8192,
    num_kv_heads=4,
    head_dim=256,
    norm=NormSpec(offset=1.0),  # Gemma stores norm weights minus 1
    tied=True,
    act="gelu_pytorch_tanh",
    names={"hidden_act": "hidden_activation"},
)
DEFAULT_WINDOW = 4096
DEFAULT_SOFTCAP = 50.0
DEFAULT_LOGIT_SOFTCAP = 30.0


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Gemma 2 config.json. Raises ConfigError for unsupported fields."""
    return build_of(config, SANDWICH_NORM)


def build_of(config: Mapping[str, Any], form: LayerForm) -> CausalLM:
    """The module of layers of a form."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    window = base.fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    windows = layer_windows(base.fields, window, [i % 2 == 0 for i in range(base.num_layers)])
    softcap = base.fields.optional_number("attn_logit_softcapping", DEFAULT_SOFTCAP, low=1e-6) or 0.0
    return decoder(
        base,
        attentions(base, windows, softcap=softcap),
        form=form,
        logit_softcap=base.fields.optional_number("final_logit_softcapping", DEFAULT_LOGIT_SOFTCAP, low=1e-6) or 0.0,
        embedding_scale=embedding_scale(base),
    )


def embedding_scale(base: BaseConfig) -> float:
    """sqrt(hidden_size) in float32; tied output logits use the unscaled table."""
    return float(np.sqrt(np.float32(base.hidden_size)))


def attentions(base: BaseConfig, windows: Sequence[int | None], **options: Any) -> list[AttentionSpec]:
    """The attention of Gemma 2 and 3; `options` are AttentionSpec's."""
    bias = base.fields.flag("attention_bias", False)
    scale = base.fields.number("query_pre_attn_scalar", 256.0, low=1e-6) ** -0.5
    return base.attentions(windows, qkv_bias=bias, o_bias=bias, scale=scale, **options)


def complete_gguf(file: GgufFile, config: dict[str, Any], *, period: int, window: int, largest_layers: int) -> None:
    """What Gemma 2 and 3 share; llama.cpp tells the 27B model, which scales queries otherwise, by its layers."""
    layers, width = config["num_hidden_layers"], config["hidden_size"] // config["num_attention_heads"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["query_pre_attn_scalar"] = width if layers == largest_layers else config["head_dim"]
    read_windows(file, config, period, window)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config, period=2, window=4096, largest_layers=46)
    for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        config[key] = file.number(key, default)


GGUF_NAMES = {**ATTENTION, **MLP, **POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
GGUF = GgufFamily("gemma2", _complete_gguf, GGUF_NAMES, norm_offset=DEFAULTS.norm.offset)
