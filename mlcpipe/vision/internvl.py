"""InternVL 3 and 3.5 (Zhu et al. 2025): a ViT with a class token and scaled layers, pixel shuffle, two matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec, PreNormEncoderLayer
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, in_layers
from mlcpipe.vision.preprocessor import CLIP_MEAN, CLIP_STD, WHERE, channels, preprocessor_fields, resample, side
from mlcpipe.vision.processors.decode import MAX_PIXELS

_PARTS: dict[str, Any] = {
    "qkv": tuple(f"attention.{part}_proj" for part in "qkv"),
    "out": ("attention.projection_layer",),
    "up": ("mlp.fc1",),
    "down": ("mlp.fc2",),
    "norms": ("layernorm_before", "layernorm_after"),
    "layer_scale": ("lambda_1", "lambda_2"),
}
_NORMS = {"layer_norm": False, "rms_norm": True}


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for tiles of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    fields.refuse(
        vision_feature_layer=[None, -1], vision_feature_select_strategy=[None, "default"], downsample_ratio=[None, 0.5]
    )
    body, facts = _body(Fields(fields.table("vision_config"), "config.json vision_config"), str(config["model_type"]))
    width = Fields(fields.table("text_config"), "config.json text_config").integer("hidden_size", 4096)
    given = preprocessor_fields(preprocessor, do_resize=(True, None))
    pixels, merge = side(given, "size", 384), 2
    if pixels != body.patch * body.side or body.side % merge:
        raise ConfigError(
            "field size", where=WHERE, expected=f"{body.side} patches of {body.patch} pixels, in pairs", found=pixels
        )
    most = given.integer("max_patches", 12, high=64)
    if most * pixels**2 > MAX_PIXELS:
        expected = f"at most {MAX_PIXELS >> 20} million pixels in all tiles"
        raise ConfigError("field max_patches", where=WHERE, expected=expected, found=f"{most} of {pixels}x{pixels}")
    settings = {
        "tile": pixels, "resample": resample(given, 3), "patch": body.patch, "merge": merge, "most": most,
        "least": given.integer("min_patches", 1, high=most),
    }  # fmt: skip
    info = VisionInfo(
        processor="internvl",
        settings=settings,
        mean=channels(preprocessor, "image_mean", CLIP_MEAN),
        std=channels(preprocessor, "image_std", CLIP_STD),
        token=fields.integer("image_token_id", 151667, low=0),
        class_token=True,
        rows=(body.side // merge) ** 2,
        merged=merge * merge,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    act = str(fields.get("projector_hidden_act", "gelu"))
    return Tower(facts, body, _Projector(merge * merge * facts.hidden_size, width, act), info)


def _square(fields: Fields, name: str, default: int) -> int:
    """A number, or two equal ones."""
    value = fields.get(name, default)
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] == value[1] else value
    return Fields({name: value}, fields.where).integer(name, high=1 << 16)


def _body(fields: Fields, model_type: str) -> tuple[InternViT, ModelFacts]:
    fields.refuse(
        num_channels=[None, 3], use_qk_norm=[None, False], use_absolute_position_embeddings=[None, True],
        attention_dropout=[None, 0, 0.0],
    )  # fmt: skip
    kind = fields.get("norm_type", "layer_norm")
    if kind not in _NORMS:
        raise ConfigError("field norm_type", where=fields.where, expected=", ".join(_NORMS), found=repr(kind))
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 1024),
        intermediate_size=fields.integer("intermediate_size", 4096),
        num_heads=fields.integer("num_attention_heads", 16, high=4096),
        act=fields.get("hidden_act", "gelu"),
        eps=fields.number("layer_norm_eps", 1e-6, low=0.0, high=1.0),
        rms=_NORMS[kind],
        attention_bias=fields.flag("attention_bias", False),
        out_bias=True,
        quantize=False,
        **_PARTS,
    )
    if spec.hidden_size % spec.num_heads:
        raise ConfigError(
            "field num_attention_heads", where=fields.where, expected=f"a divisor of {spec.hidden_size}",
            found=spec.num_heads,
        )  # fmt: skip
    layers, patch = fields.integer("num_hidden_layers", 24, high=1024), _square(fields, "patch_size", 14)
    across = _square(fields, "image_size", 448) // patch
    pooled = fields.flag("use_mean_pooling", True)
    facts = ModelFacts(model_type, 0, spec.hidden_size, layers, across * across + 1, (), ())
    return InternViT(spec, layers, patch, across, pooled), facts


class InternViT(nn.Module):
    """Embeddings, layers, and a final norm where the class token would be read; `side` patches of `patch` pixels."""

    def __init__(self, spec: EncoderSpec, count: int, patch: int, side: int, pooled: bool) -> None:
        self.patch, self.side = patch, side
        self.embeddings = _Embeddings(spec.hidden_size, patch, side)
        self.encoder = _Layers(spec, count)
        self.layernorm = None if pooled else LayerNorm(spec.hidden_size, spec.eps)

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] (0: the class token) -> [m, hidden]."""
        x = self.embeddings(patches, places)
        for layer in self.encoder.layer:
            x = layer(x, kv, None)
        return x if self.layernorm is None else self.layernorm(x)


class _Embeddings(nn.Module):
    """A patch's projection, or the class token, plus the learned vector of its place."""

    def __init__(self, hidden_size: int, patch: int, side: int) -> None:
        self.projection = Linear(3 * patch * patch, hidden_size, True, quantize=False)
        self.projection.weight.attrs["sources"] = [["patch_embeddings.projection.weight"]]
        assert self.projection.bias is not None
        self.projection.bias.attrs["sources"] = [["patch_embeddings.projection.bias"]]
        self.positions = Embedding(side * side + 1, hidden_size, quantize=False)
        self.positions.weight.attrs["sources"] = [["position_embeddings"]]
        self.cls_token = nn.Parameter((hidden_size,))

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        x = op.tensor_expr_op(_with_class, "with_class", [self.projection(patches), self.cls_token, places])
        return op.add(x, self.positions(places))


def _with_class(x: te.Tensor, token: te.Tensor, places: te.Tensor) -> te.Tensor:
    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return tirx.if_then_else(places[i] == 0, token[j].astype(x.dtype), x[i, j])

    return te.compute(x.shape, element, name="with_class")


class _Layers(nn.Module):
    def __init__(self, spec: EncoderSpec, count: int) -> None:
        self.layer = nn.ModuleList([PreNormEncoderLayer(spec, i, first_norm=True) for i in range(count)])


class _Projector(nn.Module):
    """A norm over the patches of a square, and two linear layers."""

    def __init__(self, in_features: int, width: int, act: str) -> None:
        self.in_features, self.layer_norm = in_features, LayerNorm(in_features, 1e-5)
        self.linear_1, self.act = Linear(in_features, width, True, quantize=False), activation(act)
        self.linear_2 = Linear(width, width, True, quantize=False)

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[4 * t, hidden] -> one part [t, width]."""
        x = op.reshape(x, (t, self.in_features))
        return [self.linear_2(self.act(self.linear_1(self.layer_norm(x))))]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: 1 to 12 tiles of the tower's size, bicubic."""
    if file.integer("projector.scale_factor", 2) != 2:
        raise file.error("projector.scale_factor", 2, file.integer("projector.scale_factor"))
    vision = whole["vision_config"]
    vision |= {
        "attention_bias": "v.blk.0.attn_q.bias" in file,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in file else "rms_norm",
        "use_mean_pooling": "v.post_ln.weight" not in file,
    }
    whole["image_token_id"] = file.token("<IMG_CONTEXT>")
    preprocessor |= {
        "size": {"height": vision["image_size"], "width": vision["image_size"]},
        "max_patches": file.integer("preproc_max_tiles", 12),
        "min_patches": file.integer("preproc_min_tiles", 1),
        "resample": 3,
    }


MMPROJ = Mmproj(
    "internvl",
    dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe"), "internvl"),
    _complete,
    {
        "v.class_embd": "tower.model.embeddings.cls_token",
        "v.patch_embd": "tower.model.embeddings.patch_embeddings.projection",
        "v.position_embd.weight": "tower.model.embeddings.position_embeddings",
        **in_layers(
            "tower.model.encoder.layer",
            {
                "ln1": "layernorm_before",
                **{f"attn_{x}": f"attention.{x}_proj" for x in "qkv"},
                "attn_out": "attention.projection_layer",
                "ln2": "layernorm_after",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
                **{f"ls{i}.weight": f"lambda_{i}" for i in (1, 2)},
            },
        ),
        "v.post_ln": "tower.model.layernorm",
        "mm.model.mlp.0": "tower.projector.layer_norm",
        "mm.model.mlp.1": "tower.projector.linear_1",
        "mm.model.mlp.3": "tower.projector.linear_2",
    },
)
