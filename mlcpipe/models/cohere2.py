"""Command R7B and Command A (Cohere 2024): attention beside the MLP; full layers have no rope.

Models: Command R7B, Command A 111B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import layer_windows
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily, GgufFile, read_windows
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=8192, norm=NormSpec("layer", 1e-5), tied=True, names={"rms_norm_eps": "layer_norm_eps"})
DEFAULT_WINDOW = 4096
DEFAULT_PATTERN = 4
DEFAULT_LOGIT_SCALE = 0.0625
# What published files say; transformers does not read these fields.
FIXED: Mapping[str, list[Any]] = {
    "mlp_bias": [None, False],
    "use_parallel_block": [None, True],
    "use_gated_activation": [None, True],
    "rotary_pct": [None, 1, 1.0],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Cohere 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED, use_qk_norm=[None, False])
    bias = base.fields.flag("attention_bias", False)
    window = base.fields.optional_integer("sliding_window", DEFAULT_WINDOW)
    pattern = base.fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
    windows = layer_windows(base.fields, window, [(i + 1) % pattern != 0 for i in range(base.num_layers)])
    return decoder(
        base,
        base.attentions(windows, qkv_bias=bias, o_bias=bias, interleaved=base.head_dim),
        form=PARALLEL,
        rotated=[one is not None for one in windows],
        logit_scale=base.fields.number("logit_scale", DEFAULT_LOGIT_SCALE),
    )


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The scale of logits."""
    config["logit_scale"] = file.number("logit_scale", 0.0) or 1.0


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    complete_gguf(file, config)
    read_windows(file, config, DEFAULT_PATTERN)


GGUF = GgufFamily("cohere2", _complete_gguf, PRE_NORM)
