"""LLaDA (Nie et al. 2025): Llama whose tokens all see each other, which denoises whole answers, block by block.

Models: LLaDA-8B-Base and Instruct, LLaDA-1.5. Their files have the fields and names of OLMo's first program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.bundle.model_info import Order, WholeAnswerInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(
    positions=1024, norm=NormSpec(eps=1e-5), tied=True, act="swiglu", expansion=4,
    names={
        "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "hidden_act": "activation_type",
        "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
    },
)  # fmt: skip
NAMES = CheckpointNames(
    top={
        "embed_tokens": "transformer.wte",
        "layers": "transformer.blocks",
        "norm": "transformer.ln_f",
        "lm_head": "model.transformer.ff_out",
    },
    layer={
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "q_proj",
        "self_attn.k_proj": "k_proj",
        "self_attn.v_proj": "v_proj",
        "self_attn.o_proj": "attn_out",
        "post_attention_layernorm": "ff_norm",
        "mlp.gate_proj": "ff_proj",
        "mlp.up_proj": "up_proj",
        "mlp.down_proj": "ff_out",
    },
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a LLaDA config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config, DEFAULTS, block_type=["llama"], rope=[True], layer_norm_type=["rms"], alibi=[None, False],
        attention_layer_norm=[None, False], include_bias=[None, False], bias_for_layer_norm=[None, False],
        input_emb_norm=[None, False], scale_logits=[None, False], multi_query_attention=[None],
        layer_norm_with_affine=[None, True], mlp_ratio=[None, 4],
    )  # fmt: skip
    fields = base.fields
    fields.refuse(embedding_size=[None, base.vocab_size])
    for name in ("block_type", "rope", "layer_norm_type"):
        if fields.get(name) is None:
            raise ConfigError(f"field {name}", where=fields.where, expected="that of LLaDA 8B", found="none")
    model = decoder(base, base.attentions(qkv_bias=fields.flag("include_qkv_bias", False)))
    return whole_answer(model, fields, mask=126336, orders=("low_confidence", "random"))


def whole_answer(
    model: CausalLM, fields: Fields, *, mask: int, orders: tuple[Order, ...], shifted: bool = False, context: int = 0
) -> CausalLM:
    """A model that denoises whole answers as its file says, or as the family's published program does.

    `shifted`: its logits are those of the next token. `context`: of its training, where files state more. Raises
    ConfigError for layers that see a part of the text.
    """
    if any(of.window for of in model.attentions()) or any(rope.depends_on_length for rope in model.facts.ropes):
        raise ConfigError(
            "layers of a model that denoises answers", where=fields.where,
            expected="no window, and frequencies of RoPE that do not depend on the length", found="one of them",
        )  # fmt: skip
    length = model.facts.context_length
    info = WholeAnswerInfo(
        mask=fields.integer("mask_token_id", mask, low=0, high=model.facts.vocab_size - 1), orders=orders,
        shifted=shifted, eps=fields.number("eps", 1e-3, low=1e-9, high=0.5),
    )  # fmt: skip
    model.facts = replace(model.facts, diffusion=info, context_length=min(length, context or length))
    model.model.facts = model.facts
    return model
