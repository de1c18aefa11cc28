"""ModernBERT (Warner et al. 2024): norms before, a gated MLP, rotary positions, and windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.encoder_config import check_encoder, encoder_facts
from mlcpipe.nn.encoder_layer import EncoderSpec, PreNormEncoderLayer
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.rope import Rope, cos_sin, read_rope
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.text_encoder import TextEncoder

ARCHITECTURES = ("ModernBertModel", "ModernBertForMaskedLM")
NAMES = CheckpointNames(("", "model."), ("head.", "decoder."))
# Of the layers with global attention, and of those with a window.
_ROPES = (("full_attention", "global_rope_theta", 160_000.0), ("sliding_attention", "local_rope_theta", 10_000.0))


def build(config: Mapping[str, Any]) -> TextEncoder:
    """The encoder for a ModernBERT config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    check_encoder(fields, ARCHITECTURES)
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 768),
        intermediate_size=fields.integer("intermediate_size", 1152),
        num_heads=fields.integer("num_attention_heads", 12, high=4096),
        act=fields.get("hidden_activation", "gelu"),
        eps=fields.number("norm_eps", 1e-5, low=0.0, high=1.0),
        gated=True,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_bias=fields.flag("norm_bias", False),
        qkv=("attn.Wqkv",),
        out=("attn.Wo",),
        up=("mlp.Wi",),
        down=("mlp.Wo",),
        norms=("attn_norm", "mlp_norm"),
    )
    every = fields.integer("global_attn_every_n_layers", 3, high=1024)
    slides = [bool(i % every) for i in range(fields.integer("num_hidden_layers", 22, high=1024))]
    # `local_attention` is the whole window: half of it before a token and half after.
    windows = layer_windows(fields, fields.integer("local_attention", 128, low=2) // 2 + 1, slides)
    positions = fields.integer("max_position_embeddings", 8192, high=1 << 30)
    ropes = [_rope(fields, spec.hidden_size // spec.num_heads, positions, *one) for one in _ROPES]
    facts = encoder_facts(
        fields, spec, layers=len(windows), positions=8192, vocab_size=50368, ropes=ropes,
        rope_of=[int(window is not None) for window in windows],
    )  # fmt: skip
    return TextEncoder(facts, _ModernBert(facts, spec, windows), NAMES)


def _rope(fields: Fields, head_dim: int, positions: int, kind: str, old: str, theta: float) -> Rope:
    """The frequencies of one kind of layer, of new files (`rope_parameters`) or old ones."""
    fields.refuse(rope_scaling=[None], is_causal=[None, False])
    table = Fields(fields.table("rope_parameters")).table(kind)
    return read_rope(table, head_dim, positions, theta=fields.number(old, theta, low=1.0), kinds=("default",))


class _Embeddings(nn.Module):
    """norm(word)."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec) -> None:
        self.tok_embeddings = Embedding(facts.vocab_size, facts.hidden_size)
        self.norm = LayerNorm(facts.hidden_size, spec.eps, spec.norm_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """i32[n] -> [n, hidden]."""
        return self.norm(self.tok_embeddings(tokens))


class _ModernBert(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, facts: ModelFacts, spec: EncoderSpec, windows: Sequence[int | None]) -> None:
        self.facts = facts
        self.embeddings = _Embeddings(facts, spec)
        self.layers = nn.ModuleList([PreNormEncoderLayer(spec, index, window) for index, window in enumerate(windows)])
        self.final_norm = LayerNorm(facts.hidden_size, spec.eps, spec.norm_bias)

    def forward(self, tokens: Tensor, types: Tensor, kv: StepStates) -> Tensor:
        """tokens i32[n] -> [n, hidden]."""
        x, positions = self.embeddings(tokens), kv.positions(tokens.shape[0])
        tables = [cos_sin(rope, positions, None) for rope in self.facts.ropes]
        for layer, rope in zip(self.layers, self.facts.rope_of):
            x = layer(x, kv, tables[rope])
        return self.final_norm(x)
