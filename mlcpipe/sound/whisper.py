"""Whisper (Radford et al. 2022), tiny to large-v3-turbo and distilled ones: two convolutions, pre-norm layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.config import Fields
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.speech_model import SoundShape, SpeechModel
from mlcpipe.nn.step_states import StepStates

CONVOLUTIONS = (".conv1.weight", ".conv2.weight")  # in files [out, in, 3], here matrices
_TAPS = 3
_EPS = 1e-5  # of torch's LayerNorm
NAMES = CheckpointNames(("model.", ""), ("proj_out.",))


def build(config: Mapping[str, Any]) -> SpeechModel:
    """The model of a config.json, with transformers' defaults. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    fields.refuse(scale_embedding=[None, False], is_encoder_decoder=[None, True], tie_word_embeddings=[None, True])
    hidden, act = fields.integer("d_model", 384), fields.get("activation_function", "gelu")
    spec, encoder = (_attention(fields, side, hidden) for side in ("decoder", "encoder"))
    layers = {side: fields.integer(f"{side}_layers", 4, high=1024) for side in ("decoder", "encoder")}
    widths = {side: fields.integer(f"{side}_ffn_dim", 1536) for side in ("decoder", "encoder")}
    vocab, positions = fields.integer("vocab_size", 51865), fields.integer("max_target_positions", 448)
    shape = SoundShape(
        rows=fields.integer("max_source_positions", 1500, high=1 << 14),
        mels=fields.integer("num_mel_bins", 80, high=512), encoder=encoder, layers=layers["encoder"],
    )  # fmt: skip
    facts = ModelFacts("whisper", vocab, hidden, layers["decoder"], positions, (), (), tied=True, bound=positions)
    body = _Body(
        _Encoder(shape, widths["encoder"], act),
        _Decoder(facts, spec, layers["decoder"], widths["decoder"], act),
    )
    return SpeechModel(facts, body, spec, shape, NAMES)


def _attention(fields: Fields, side: str, hidden: int) -> AttentionSpec:
    name = f"{side}_attention_heads"
    heads = fields.integer(name, 6, high=4096)
    if hidden % heads:
        raise ConfigError(f"field {name}", where=fields.where, expected=f"a divisor of {hidden}", found=heads)
    return AttentionSpec(hidden, heads, heads, hidden // heads)


class _Body(nn.Module):
    """Both halves, named as in the checkpoint."""

    def __init__(self, encoder: _Encoder, decoder: _Decoder) -> None:
        self.encoder, self.decoder = encoder, decoder


class _Encoder(nn.Module):
    """features -> rows of sound."""

    def __init__(self, shape: SoundShape, width: int, act: str) -> None:
        hidden = shape.encoder.hidden_size
        self.mels = shape.mels
        self.conv1 = Linear(_TAPS * shape.mels, hidden, True, quantize=False)
        self.conv2 = Linear(_TAPS * hidden, hidden, True, quantize=False)
        self.embed_positions = Embedding(shape.rows, hidden, quantize=False)
        self.layers = nn.ModuleList([_EncoderLayer(shape.encoder, i, width, act) for i in range(shape.layers)])
        self.layer_norm = LayerNorm(hidden, _EPS)

    def forward(self, features: Tensor, kv: StepStates) -> Tensor:
        """[t, 2 * mels] -> [t, hidden]."""
        t = features.shape[0]
        x = op.gelu(self.conv1(_taps(op.reshape(features, (2 * t, self.mels)), 1)))
        x = op.gelu(self.conv2(_taps(x, 2)))
        x = op.add(x, self.embed_positions(kv.positions(t)))
        for layer in self.layers:
            x = layer(x, kv)
        return self.layer_norm(x)


def _taps(x: Tensor, stride: int) -> Tensor:
    """x [stride * m, c] -> [m, 3 * c]: of each channel the numbers around row stride * i, zeros outside."""

    def taps(a: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            row = stride * i + j % _TAPS - 1
            inside = tirx.all(row >= 0, row < a.shape[0])
            return tirx.if_then_else(inside, a[row, j // _TAPS], tirx.const(0, a.dtype))

        rows = a.shape[0] if stride == 1 else tirx.floordiv(a.shape[0], stride)
        return te.compute((rows, _TAPS * int(a.shape[1])), element, name="taps")

    return op.tensor_expr_op(taps, "taps", [x])


class _Attention(nn.Module):
    """Attention of rows to each other; the projection of keys has no bias."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        hidden = spec.hidden_size
        self.spec, self.layer = spec, layer
        self.qkv = Linear(hidden, 3 * hidden)
        self.qkv.weight.attrs["sources"] = [[f"{part}_proj.weight" for part in "qkv"]]
        self.qkv.q_bias, self.qkv.v_bias = _bias(hidden, "q_proj.bias"), _bias(hidden, "v_proj.bias")
        self.out_proj = Linear(hidden, hidden, True)

    def forward(self, x: Tensor, kv: StepStates) -> Tensor:
        """[m, hidden] -> [m, hidden]."""
        heads, dim = self.spec.num_heads, self.spec.head_dim
        qkv = _biased(self.qkv(x), (self.qkv.q_bias, None, self.qkv.v_bias))
        return self.out_proj(kv.attend(self.layer, self.spec, op.reshape(qkv, (x.shape[0], 3 * heads, dim))))


class _CrossAttention(nn.Module):
    """Attention of text to sound, whose keys and values `keep` stores."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        hidden = spec.hidden_size
        self.spec, self.layer = replace(spec, reads=layer), layer
        self.q_proj, self.out_proj = Linear(hidden, hidden, True), Linear(hidden, hidden, True)
        self.kv = Linear(hidden, 2 * hidden)
        self.kv.weight.attrs["sources"] = [["k_proj.weight", "v_proj.weight"]]
        self.kv.v_bias = _bias(hidden, "v_proj.bias")

    def forward(self, x: Tensor, sound: StepStates) -> Tensor:
        """[m, hidden] -> [m, hidden]."""
        q = op.reshape(self.q_proj(x), (x.shape[0], self.spec.num_heads, self.spec.head_dim))
        return self.out_proj(sound.attend(self.layer, self.spec, q))

    def keep(self, heard: Tensor, sound: StepStates) -> None:
        """Store what [t, hidden] make."""
        kv = _biased(self.kv(heard), (None, self.kv.v_bias))
        sound.keep(self.layer, self.spec, op.reshape(kv, (heard.shape[0], 2 * self.spec.num_heads, self.spec.head_dim)))


def _bias(size: int, source: str) -> nn.Parameter:
    made = nn.Parameter((size,))
    made.attrs["sources"] = [[source]]
    return made


def _biased(x: Tensor, biases: tuple[nn.Parameter | None, ...]) -> Tensor:
    """x [m, parts * n], with a bias [n] added to those parts that have one."""
    given = [one for one in biases if one is not None]

    def element(a: te.Tensor, *each: te.Tensor) -> te.Tensor:
        n, rest = int(each[0].shape[0]), iter(each)
        own = [None if one is None else next(rest) for one in biases]

        def value(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            added = tirx.const(0, a.dtype)
            for part, bias in enumerate(own):
                if bias is not None:
                    added = tirx.if_then_else(j // n == part, bias[j % n].astype(a.dtype), added)
            return a[i, j] + added

        return te.compute(a.shape, value, name="biased")

    return op.tensor_expr_op(element, "biased", [x, *given])


class _Layer(nn.Module):
    """What layers of both halves have."""

    def __init__(self, spec: AttentionSpec, layer: int, width: int, act: str) -> None:
        hidden = spec.hidden_size
        self.self_attn = _Attention(spec, layer)
        self.self_attn_layer_norm = LayerNorm(hidden, _EPS)
        self.fc1, self.fc2, self.act = Linear(hidden, width, True), Linear(width, hidden, True), activation(act)
        self.final_layer_norm = LayerNorm(hidden, _EPS)


class _EncoderLayer(_Layer):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def forward(self, x: Tensor, kv: StepStates) -> Tensor:
        """[m, hidden] -> [m, hidden]."""
        x, normed = self.final_layer_norm.of_sum(x, self.self_attn(self.self_attn_layer_norm(x), kv))
        return op.add(x, self.fc2(self.act(self.fc1(normed))))


class _DecoderLayer(_Layer):
    """As the encoder's, with attention to sound before the MLP."""

    def __init__(self, spec: AttentionSpec, layer: int, width: int, act: str) -> None:
        super().__init__(spec, layer, width, act)
        self.encoder_attn = _CrossAttention(spec, layer)
        self.encoder_attn_layer_norm = LayerNorm(spec.hidden_size, _EPS)

    def forward(self, x: Tensor, kv: StepStates, sound: StepStates) -> Tensor:
        """[n, hidden] -> [n, hidden]."""
        x, normed = self.encoder_attn_layer_norm.of_sum(x, self.self_attn(self.self_attn_layer_norm(x), kv))
        x, normed = self.final_layer_norm.of_sum(x, self.encoder_attn(normed, sound))
        return op.add(x, self.fc2(self.act(self.fc1(normed))))


class _Decoder(nn.Module):
    """Tokens -> hidden states -> logits, with the embedding as the last matrix."""

    def __init__(self, facts: ModelFacts, spec: AttentionSpec, count: int, width: int, act: str) -> None:
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size)
        self.embed_positions = Embedding(facts.context_length, facts.hidden_size, quantize=False)
        self.layers = nn.ModuleList([_DecoderLayer(spec, i, width, act) for i in range(count)])
        self.layer_norm = LayerNorm(facts.hidden_size, _EPS)

    def forward(self, tokens: Tensor, kv: StepStates, sound: StepStates) -> Tensor:
        """i32[n] -> [n, hidden]."""
        x = op.add(self.embed_tokens(tokens), self.embed_positions(kv.positions(tokens.shape[0])))
        for layer in self.layers:
            x = layer(x, kv, sound)
        return self.layer_norm(x)

    def keep(self, heard: Tensor, sound: StepStates) -> None:
        """Store the keys and values that all layers make of the sound [t, hidden]."""
        for layer in self.layers:
            layer.encoder_attn.keep(heard, sound)

    def project(self, x: Tensor) -> Tensor:
        """[m, hidden] -> logits [m, vocab]."""
        return self.embed_tokens.project(x)
