"""StableLM 3B and 2 (Stability AI 2023): Llama with layer norms, RoPE over a quarter of each head.

Models: StableLM 3B, StableLM Zephyr 3B, StableLM 2 1.6B and 12B, Stable Code 3B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PARALLEL, PRE_NORM
from mlcpipe.nn.gguf import PRE_NORM as GGUF_NAMES
from mlcpipe.nn.gguf import GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=4096, num_kv_heads=32, norm=NormSpec("layer", 1e-5, bias=True), names={"rms_norm_eps": "layer_norm_eps"}
)
NAMES = CheckpointNames(layer={f"self_attn.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"})


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a StableLM config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, attention_bias=[None], mlp_bias=[None, False])
    fields = base.fields
    fields.refuse(head_dim=[None, base.hidden_size // base.num_heads])
    bias, normed = fields.flag("use_qkv_bias", False), fields.flag("qk_layernorm", False)
    parallel = fields.flag("use_parallel_residual", False)
    norm = replace(base.norm, bias=False)
    specs = base.attentions(qkv_bias=bias, norm="each" if normed else "", norm_of=norm)
    model = decoder(base, specs, form=PARALLEL if parallel else PRE_NORM, ropes=[base.rope(partial=0.25)])
    for layer in model.model.layers if normed else ():
        for x, heads in (("q", base.num_heads), ("k", base.num_kv_heads)):
            weight = getattr(layer.self_attn, f"{x}_norm").weight
            weight.attrs["sources"] = [[f"{x}_norm.norms.{i}.weight" for i in range(heads)]]
    return model


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in file
    config["use_parallel_residual"] = bool(file.get("use_parallel_residual", False))
    config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in file


HEAD_NORMS = {f"attn_{x}_norm": f"self_attn.{x}_norm.norms.{{}}" for x in "qk"}
GGUF = GgufFamily("stablelm", _complete_gguf, {**GGUF_NAMES, **HEAD_NORMS}, rope="partial")
