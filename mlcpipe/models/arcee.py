"""AFM (Arcee 2025): Llama with an MLP of two matrices and a squared ReLU.

Models: AFM 4.5B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.llama import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import GgufFamily
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=4096, norm=NormSpec(eps=1e-5), act="relu2")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an Arcee config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS)
    bias, mlp_bias = base.fields.flag("attention_bias", False), base.fields.flag("mlp_bias", False)
    return decoder(base, base.attentions(qkv_bias=bias, o_bias=bias), lambda i: base.plain_mlp(mlp_bias))


GGUF = GgufFamily("arcee", complete_gguf, interleaved=True)
