"""ERNIE 4.5 (Baidu 2025), dense: Llama with rope over pairs and one flag for all biases.

Models: ERNIE 4.5 0.3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily, GgufFile
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=2, head_dim=128, norm=NormSpec(eps=1e-5), theta=5e5, tied=True)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an ERNIE 4.5 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None, False], mlp_bias=[None, False])
    bias = base.fields.flag("use_bias", False)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, interleaved=base.head_dim)
    return decoder(base, specs, lambda i: base.mlp(bias=bias))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in file


GGUF = GgufFamily("ernie4_5", _complete_gguf)
