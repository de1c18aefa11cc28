"""BitNet b1.58 2B4T (Ma et al. 2025): norms of what the last matrices of attention and MLP multiply, squared ReLU.

Models: BitNet b1.58 2B4T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=2048, num_kv_heads=5, norm=NormSpec(eps=1e-5), theta=5e5, act="relu2")
NAMES = CheckpointNames(layer={"self_attn.sub_norm": "self_attn.attn_sub_norm", "mlp.sub_norm": "mlp.ffn_sub_norm"})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a BitNet config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    bias = base.fields.flag("attention_bias", False)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, sub_norm=True)
    return decoder(base, specs, lambda i: base.mlp(sub_norm=base.norm))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """llama.cpp's files are those of models before 2B4T, with SiLU."""
    config["attention_bias"], config["hidden_act"] = "blk.0.attn_q.bias" in file, "silu"


GGUF_NAMES = {**PRE_NORM, "attn_sub_norm": "self_attn.sub_norm", "ffn_sub_norm": "mlp.sub_norm"}
GGUF = GgufFamily("bitnet", _complete_gguf, GGUF_NAMES)
