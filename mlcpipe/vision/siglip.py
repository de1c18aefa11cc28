"""SigLIP's vision tower (Zhai et al. 2023), which Idefics3, SmolVLM and others see with."""

from __future__ import annotations

from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec, PreNormEncoderLayer
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.step_states import StepStates
from mlcpipe.vision.mmproj import in_layers

_PARTS: dict[str, Any] = {
    "qkv": tuple(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")),
    "out": ("self_attn.out_proj",),
    "up": ("mlp.fc1",),
    "down": ("mlp.fc2",),
    "norms": ("layer_norm1", "layer_norm2"),
}


def siglip(fields: Fields, model_type: str, *, final_norm: bool = True) -> tuple[ModelFacts, Siglip]:
    """The tower of a `vision_config`, with transformers' defaults; without `final_norm` it gives what layers made.

    Raises ConfigError for unsupported fields.
    """
    fields.refuse(num_channels=[None, 3], attention_dropout=[None, 0, 0.0])
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 1152),
        intermediate_size=fields.integer("intermediate_size", 3072),
        num_heads=fields.integer("num_attention_heads", 16, high=4096),
        act=fields.get("hidden_act", "gelu_pytorch_tanh"),
        eps=fields.number("layer_norm_eps", 1e-6, low=0.0, high=1.0),
        quantize=False,
        **_PARTS,
    )
    if spec.hidden_size % spec.num_heads:
        raise ConfigError(
            "field num_attention_heads", where=fields.where, expected=f"a divisor of {spec.hidden_size}",
            found=spec.num_heads,
        )  # fmt: skip
    layers = fields.integer("num_hidden_layers", 12, high=1024)
    patch = fields.integer("patch_size", 32, high=1024)
    side = fields.integer("image_size", 224, low=patch, high=1 << 16) // patch
    facts = ModelFacts(model_type, 0, spec.hidden_size, layers, side * side, (), ())
    return facts, Siglip(spec, layers, patch, side, final_norm)


class _Embeddings(nn.Module):
    """A patch's projection plus the learned vector of its place."""

    def __init__(self, hidden_size: int, patch: int, side: int) -> None:
        self.patch_embedding = Linear(3 * patch * patch, hidden_size, True, quantize=False)
        self.position_embedding = Embedding(side * side, hidden_size, quantize=False)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        return op.add(self.patch_embedding(patches), self.position_embedding(places))


class _Layers(nn.Module):
    """The layers, named as in the checkpoint."""

    def __init__(self, spec: EncoderSpec, count: int) -> None:
        self.layers = nn.ModuleList([PreNormEncoderLayer(spec, i, first_norm=True) for i in range(count)])


class Siglip(nn.Module):
    """Embeddings, layers and final norm; `patch` pixels, a table of side * side places."""

    def __init__(self, spec: EncoderSpec, count: int, patch: int, side: int, final_norm: bool) -> None:
        self.patch, self.side, self.eps = patch, side, spec.eps
        self.embeddings = _Embeddings(spec.hidden_size, patch, side)
        self.encoder = _Layers(spec, count)
        self.post_layernorm = LayerNorm(spec.hidden_size, spec.eps) if final_norm else None

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        x = self.embeddings(patches, places)
        for layer in self.encoder.layers:
            x = layer(x, kv, None)
        return x if self.post_layernorm is None else self.post_layernorm(x)


MMPROJ_NAMES = {
    "v.patch_embd": "tower.model.embeddings.patch_embedding",
    "v.position_embd": "tower.model.embeddings.position_embedding",
    **in_layers(
        "tower.model.encoder.layers",
        {
            "ln1": "layer_norm1",
            **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
            "attn_out": "self_attn.out_proj",
            "ln2": "layer_norm2",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "v.post_ln": "tower.model.post_layernorm",
}
