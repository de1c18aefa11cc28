"""Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions and a gated MLP; the second version has experts.

Models: nomic-embed-text-v1 and v1.5, nomic-embed-text-v2-moe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields, rope_table
from mlcpipe.nn.encoder_config import check_encoder, encoder_facts
from mlcpipe.nn.encoder_layer import EncoderLayer, EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding
from mlcpipe.nn.moe import Routing, SparseMoE
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.rope import cos_sin, read_rope
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.text_encoder import TextEncoder

ARCHITECTURES = ("NomicBertModel", "NomicBertForMaskedLM")
NAMES = CheckpointNames(("", "nomic_bert."), ("pooler.", "cls."))
# Published files name fields as GPT-2 does.
_OLD_NAMES = {
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
# Values of the published files' own fields that define the family.
_FIXED: Mapping[str, list[Any]] = {
    "activation_function": [None, "swiglu", "gelu"],
    "rotary_emb_fraction": [None, 1, 1.0],
    "rotary_emb_interleaved": [None, False],
    "rotary_emb_scale_base": [None],
    "rotary_scaling_factor": [None],
    "prenorm": [None, False],
    "causal": [None, False],
    "parallel_block": [None, False],
    "use_rms_norm": [None, False],
    "expert_choice_router": [None, False],
    "moe_normalize_expert_weights": [None, False],
    "num_shared_experts": [None, 0],
}


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a Nomic BERT config.json. Raises ConfigError for unsupported fields."""
    check_encoder(Fields(config), ARCHITECTURES, **_FIXED)
    fields = Fields({_OLD_NAMES.get(name, name): value for name, value in config.items()})
    gated, bias = fields.get("activation_function", "swiglu") == "swiglu", fields.flag("mlp_fc1_bias", False)
    fields.refuse(mlp_fc2_bias=[bias, *([] if bias else [None])])
    hidden, heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12, high=4096)
    spec = EncoderSpec(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=heads,
        act=fields.get("hidden_act", "silu") if gated else "gelu",
        eps=fields.number("layer_norm_eps", 1e-12, low=0.0, high=1.0),
        gated=gated,
        attention_bias=fields.flag("qkv_proj_bias", False),
        mlp_bias=bias,
        qkv=("attn.Wqkv",),
        out=("attn.out_proj",),
        up=("mlp.fc12", "mlp.fc11") if gated else ("mlp.fc1",),
        down=("mlp.fc2",),
        norms=("norm1", "norm2"),
    )
    positions = fields.integer("max_position_embeddings", 2048, high=1 << 30)
    if hidden % heads or fields.integer("head_dim", hidden // heads) != hidden // heads:
        raise ConfigError(
            "field head_dim", where=fields.where, expected=f"{hidden} / {heads}", found=config.get("head_dim")
        )
    theta = fields.number("rope_theta", 1000.0, low=1.0)
    rope = read_rope(rope_table(fields), hidden // heads, positions, theta=theta, kinds=("default",))
    layers = fields.integer("num_hidden_layers", 12, high=1024)
    facts = encoder_facts(
        fields, spec, layers=layers, positions=2048, vocab_size=30528, ropes=[rope], rope_of=[0] * layers
    )
    every = fields.integer("moe_every_n_layers", 0, low=0) if fields.get("num_experts", 0) else 0
    sparse = [every > 0 and i % every == 1 for i in range(layers)]
    if any(sparse) and (gated or not bias):
        raise ConfigError("experts", where=fields.where, expected="an MLP of two matrices with biases", found="another")
    routing = None
    if any(sparse):
        experts = fields.integer("num_experts", high=4096)
        routing = Routing(experts, fields.integer("moe_top_k", 1, high=experts))
    body = RotaryBert(facts, spec, fields.integer("type_vocab_size", 2), sparse, routing)
    return TextEncoder(facts, body, NAMES)


class _Experts(SparseMoE):
    """Experts of two matrices, and a bias of their sum."""

    def __init__(self, spec: EncoderSpec, routing: Routing) -> None:
        super().__init__(spec.hidden_size, spec.intermediate_size, routing, spec.act, gated=False)
        self.gate.weight.attrs["sources"] = [["router.layer.weight"]]
        self.bias = nn.Parameter((spec.hidden_size,))
        self.bias.attrs["sources"] = [["mlp.experts.bias"]]

    def forward(self, x: Tensor) -> Tensor:
        return op.add(super().forward(x), self.bias)


class _SparseLayer(EncoderLayer):
    """A layer whose MLP is a mixture of experts."""

    def __init__(self, spec: EncoderSpec, layer: int, routing: Routing) -> None:
        super().__init__(spec, layer)
        self.up = self.down = None
        self.mlp = _Experts(spec, routing)

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class _Embeddings(nn.Module):
    """word + token type, named as in the checkpoint."""

    def __init__(self, facts: ModelFacts, types: int) -> None:
        self.word_embeddings = Embedding(facts.vocab_size, facts.hidden_size)
        self.token_type_embeddings = Embedding(types, facts.hidden_size, quantize=False)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        """Two times i32[n] -> [n, hidden]."""
        return op.add(self.word_embeddings(tokens), self.token_type_embeddings(types))


class _Layers(nn.Module):
    """The layers, named as in the checkpoint."""

    def __init__(self, spec: EncoderSpec, sparse: Sequence[bool], routing: Routing | None) -> None:
        self.layers = nn.ModuleList(
            [
                _SparseLayer(spec, i, routing) if one and routing else EncoderLayer(spec, i)
                for i, one in enumerate(sparse)
            ]
        )


class RotaryBert(nn.Module):
    """Embeddings, their norm, and layers; those that are `sparse` have experts."""

    def __init__(
        self,
        facts: ModelFacts,
        spec: EncoderSpec,
        types: int,
        sparse: Sequence[bool] = (),
        routing: Routing | None = None,
    ) -> None:
        self.rope = facts.ropes[0]
        self.embeddings = _Embeddings(facts, types)
        self.emb_ln = LayerNorm(facts.hidden_size, spec.eps)
        self.encoder = _Layers(spec, sparse or [False] * facts.num_layers, routing)

    def forward(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens and types i32[n] -> [n, hidden]."""
        x = self.emb_ln(self.embeddings(tokens, types))
        rotation = cos_sin(self.rope, kv.positions(tokens.shape[0]), None)
        for layer in self.encoder.layers:
            x = layer(x, kv, rotation)
        return x
