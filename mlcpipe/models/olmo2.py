"""OLMo 2 (Walsh et al. 2024): norms after attention and MLP, and over all heads of q and of k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder_layer import PostNormLayer
from mlcpipe.nn.gguf import ATTENTION, MLP, POST_NORMS, GgufFamily

DEFAULTS = Defaults(positions=2048, eps=1e-5)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMo 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    windows = layer_windows(base.fields, None, [False] * base.num_layers, fixed=True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias, norm="all")
    layers = [PostNormLayer(Attention(spec, i), base.mlp(), base.hidden_size, base.eps) for i, spec in enumerate(specs)]
    return CausalLM(base.facts([base.rope()]), layers)


GGUF = GgufFamily("olmo2", complete_gguf, {**ATTENTION, **MLP, **POST_NORMS})
