"""Mamba-2 (Dao & Gu 2024): scans in every layer, and nothing else.

Models: Codestral Mamba 7B, Mamba 2 130M to 2.7B in transformers' format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.mamba import FIXED
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import MIXER_ALONE
from mlcpipe.nn.gguf import SCAN as GGUF_SCAN
from mlcpipe.nn.gguf import GgufFamily, GgufFile
from mlcpipe.nn.mamba2 import Mamba2, read_gguf, read_mamba2
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=1 << 20,  # files say none
    head_dim=64,
    norm=NormSpec(eps=1e-5),
    intermediate_size=1,
    names={"rms_norm_eps": "layer_norm_epsilon", "num_attention_heads": "num_heads"},
)
NAMES = CheckpointNames(
    prefixes=("backbone.", "model.backbone."),
    top={"embed_tokens": "embeddings", "norm": "norm_f"},
    layer={"mamba": "mixer"},
)
SCAN: Mapping[str, tuple[str, int | bool]] = {
    "heads": ("num_heads", 128),
    "state_size": ("state_size", 128),
    "groups": ("n_groups", 8),
    "taps": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False),
    "out_bias": ("use_bias", False),
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mamba-2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    fields.refuse(num_attention_heads=[None, base.num_heads])
    inner = fields.integer("expand", 2, high=64) * base.hidden_size
    scan = read_mamba2(fields, base.hidden_size, inner, "head_dim", SCAN, eps=base.norm.eps)
    mixers = [Mixer("mamba", Mamba2(scan, i)) for i in range(count)]
    return decoder(base, mixers, lambda i: None, form=MIXER_ALONE, rotated=[False] * count)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    inner = read_gguf(file, config, SCAN)
    config["expand"], rest = divmod(inner, config["hidden_size"])
    if rest or not config["num_heads"] or inner % config["num_heads"]:
        raise file.error("ssm.inner_size", f"a multiple of {config['hidden_size']} and of the heads", inner)
    config["head_dim"] = inner // config["num_heads"]
    del config["intermediate_size"]


GGUF = GgufFamily("mamba2", _complete_gguf, {**GGUF_SCAN, "attn_norm": "norm"})
