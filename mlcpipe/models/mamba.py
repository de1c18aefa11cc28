"""Mamba (Gu & Dao 2023): scans in every layer, and nothing else.

Models: Mamba 130M to 2.8B in transformers' format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import MIXER_ALONE
from mlcpipe.nn.gguf import CHANNEL_SCAN, GgufFamily, GgufFile
from mlcpipe.nn.mamba import Mamba, MambaSpec
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=1 << 20,  # files say none
    norm=NormSpec(eps=1e-5),
    tied=True,
    num_heads=1,
    head_dim=64,
    intermediate_size=1,
    names={"rms_norm_eps": "layer_norm_epsilon"},
)
NAMES = CheckpointNames(
    prefixes=("backbone.", "model."),
    top={"embed_tokens": "embeddings", "norm": "norm_f"},
    layer={"mamba": "mixer"},
)
FIXED: Mapping[str, list[Any]] = {
    "hidden_act": [None, "silu"],
    "layer_types": [None],
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Mamba config.json. Raises ConfigError for unsupported fields."""
    return scanning(config, None)


def scanning(config: Mapping[str, Any], norm: NormSpec | None) -> CausalLM:
    """The model, with this norm of dt, B and C."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, hidden, count = base.fields, base.hidden_size, base.num_layers
    spec = MambaSpec(
        hidden,
        fields.integer("intermediate_size", fields.integer("expand", 2, high=64) * hidden),
        fields.integer("state_size", 16, high=1024),
        rank_of(fields, "time_step_rank", hidden),
        fields.integer("conv_kernel", 4, low=2, high=64),
        fields.flag("use_conv_bias", True),
        fields.flag("use_bias", False),
        norm,
    )
    mixers = [Mixer("mamba", Mamba(spec, i)) for i in range(count)]
    return decoder(base, mixers, lambda i: None, form=MIXER_ALONE, rotated=[False] * count)


def rank_of(fields: Fields, name: str, hidden_size: int) -> int:
    """The rank of dt: by default a sixteenth of the hidden size, rounded up."""
    return -(-hidden_size // 16) if fields.get(name, "auto") == "auto" else fields.integer(name)


def complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """The fields of config.json that GGUF has of families like Mamba."""
    config.update(num_attention_heads=1, num_key_value_heads=1, head_dim=DEFAULTS.head_dim)
    config["intermediate_size"], config["time_step_rank"] = (
        file.integer(f"ssm.{key}") for key in ("inner_size", "time_step_rank")
    )
    config["state_size"], config["conv_kernel"] = (file.integer(f"ssm.{key}") for key in ("state_size", "conv_kernel"))
    config["use_conv_bias"], config["use_bias"] = (f"blk.0.ssm_{part}.bias" in file for part in ("conv1d", "in"))


GGUF = GgufFamily("mamba", complete_gguf, {**CHANNEL_SCAN, "attn_norm": "norm"})
