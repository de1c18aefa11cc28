"""GLM-4-9B-chat, GLM-Edge (Z.ai 2024): rope over half of each head in pairs, fused gate and up.

Models: GLM-4-9B-chat-hf, GLM-Edge 1.5B, 4B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.decoder_layer import PRE_NORM as FORM
from mlcpipe.nn.decoder_layer import LayerForm
from mlcpipe.nn.gguf import PRE_NORM, GgufFamily
from mlcpipe.nn.mlp import FusedGatedMLP
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=131072, num_kv_heads=2, head_dim=128, norm=NormSpec(eps=1.5625e-7))
DEFAULT_ROTATED = 0.5


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM config.json. Raises ConfigError for unsupported fields."""
    return build_of(config, FORM)


def build_of(config: Mapping[str, Any], form: LayerForm) -> CausalLM:
    """The module of layers of a form."""
    base = read_base(config, DEFAULTS, mlp_bias=[None, False])
    rope = base.rope(partial=DEFAULT_ROTATED)
    bias, in_pairs = base.fields.flag("attention_bias", True), base.fields.flag("rope_interleave", True)
    return decoder(
        base,
        base.attentions(qkv_bias=bias, interleaved=rope.rotary_dim if in_pairs else 0),
        lambda i: FusedGatedMLP(base.hidden_size, base.intermediate_size, base.act),
        form=form,
        ropes=[rope],
    )


GGUF_NAMES = {**PRE_NORM, "ffn_up": "mlp.gate_up_proj"}
GGUF = GgufFamily("chatglm", complete_gguf, GGUF_NAMES, rope="partial")
