"""StarCoder 2 (Lozhkov et al. 2024): Llama with layer norms, an MLP of two matrices, biases and a sliding window.

Models: StarCoder2 3B, 7B, 15B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import ATTENTION, PLAIN_MLP, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=4096,
    num_kv_heads=2,
    norm=NormSpec("layer", 1e-5, bias=True),
    tied=True,
    act="gelu_pytorch_tanh",
    names={"rms_norm_eps": "norm_epsilon"},
)
NAMES = CheckpointNames(layer={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a StarCoder 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None], mlp_bias=[None, False])
    bias, window = base.fields.flag("use_bias", True), base.fields.optional_integer("sliding_window", None)
    windows = layer_windows(base.fields, window, [window is not None] * base.num_layers, fixed=True)
    specs = base.attentions(windows, qkv_bias=bias, o_bias=bias)
    return decoder(base, specs, lambda i: base.plain_mlp(bias=bias))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in file
    config["sliding_window"] = file.integer("attention.sliding_window", 0) or None


GGUF = GgufFamily("starcoder2", _complete_gguf, {**ATTENTION, **PLAIN_MLP, "ffn_norm": "post_attention_layernorm"})
