"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023): attention and MLP side by side, each with its norm.

Models: Pythia 14M to 12B, GPT-NeoX 20B, Dolly 2, RedPajama-INCITE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import LayerForm
from mlcpipe.nn.gguf import FUSED, PLAIN_MLP, GgufFamily, GgufFile
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=2048,
    fixed_heads=True,
    norm=NormSpec("layer", 1e-5, bias=True),
    act="gelu",
    intermediate_size=24576,
    names={"rms_norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
)
NAMES = CheckpointNames(
    prefixes=("gpt_neox.", ""),
    top={"embed_tokens": "embed_in", "norm": "final_layer_norm", "lm_head": "embed_out"},
    layer={
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GPT-NeoX config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    fields = base.fields
    bias, parallel = fields.flag("attention_bias", True), fields.flag("use_parallel_residual", True)
    specs = base.attentions(qkv_bias=bias, o_bias=bias, fused="groups")
    rope = base.rope(partial=fields.number("rotary_pct", 0.25, low=0.0, high=1.0))
    form = LayerForm(parallel=parallel)
    return decoder(base, specs, lambda i: base.plain_mlp(bias=True), form=form, ropes=[rope])


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    config["use_parallel_residual"] = bool(file.get("use_parallel_residual", True))
    config["attention_bias"] = "blk.0.attn_qkv.bias" in file


GGUF = GgufFamily(
    "gptneox",
    _complete_gguf,
    {**FUSED, **PLAIN_MLP, "ffn_norm": "post_attention_layernorm"},
    rope="partial",
    grouped=True,
)
