"""OLMo Hybrid (Ai2 2026): gated delta nets, and in every fourth layer the attention of OLMo 3; published without RoPE.

Models: OLMo-Hybrid-7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.qwen3_5_text import KINDS, delta_spec
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds, rope_table
from mlcpipe.nn.decoder import Mixer, decoder
from mlcpipe.nn.decoder_layer import POST_NORM, LayerForm
from mlcpipe.nn.gated_delta import GatedDelta
from mlcpipe.nn.names import CheckpointNames

DEFAULTS = Defaults(positions=65536)
# Of layers with delta nets; transformers 5 saves one of them under a name of the others.
DELTA_NORMS = LayerForm("attention_layer_norm", "", "feedforward_layer_norm")
NAMES = CheckpointNames(
    layer={"linear_attn.norm": "linear_attn.o_norm", "linear_attn.out_proj": "linear_attn.o_proj"},
    also={"post_attention_layernorm": "feedforward_layer_norm"},
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an OLMo Hybrid config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, sliding_window=[None], mlp_bias=[None, False], hidden_act=[None, "silu"])
    fields, hidden = base.fields, base.hidden_size
    bias = fields.flag("attention_bias", False)
    key_heads = fields.integer("linear_num_key_heads", base.num_heads, high=4096)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * hidden / key_heads), high=4096)
    delta = delta_spec(
        base, (key_heads, base.num_heads, key_dim, 2 * key_dim), eps=1e-5, qkvz=tuple(f"{x}_proj" for x in "qkvg"),
        ba=("b_proj", "a_proj"), conv=tuple(f"{x}_conv1d" for x in "qkv"),
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )  # fmt: skip
    last = base.num_layers - 1
    attends = layer_kinds(fields, last + 1, KINDS) or [i % 4 == 3 or i == last < 3 for i in range(last + 1)]
    attention = base.attention(qkv_bias=bias, o_bias=bias, norm="all")
    return decoder(
        base,
        [attention if one else Mixer("linear_attn", GatedDelta(delta, i)) for i, one in enumerate(attends)],
        form=[POST_NORM if one else DELTA_NORMS for one in attends],
        rotated=[_rotates(fields)] * base.num_layers,
    )


def _rotates(fields: Fields) -> bool:
    """Whether there is RoPE: null as its base says no."""
    table = rope_table(fields)
    stated = table if "rope_theta" in table else fields.values
    return stated.get("rope_theta", 0) is not None
