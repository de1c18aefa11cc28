"""Pixtral's tower (Agrawal et al. 2024), as Mistral Small 3 and Ministral 3 have it, for pictures of their own size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec, PreNormEncoderLayer
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.axial import axial_rotation
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, check_eps, in_layers
from mlcpipe.vision.preprocessor import CLIP_MEAN, CLIP_STD, WHERE, channels, preprocessor_fields, resample

_EPS = 1e-5
_MOST_ROWS = 1 << 14  # of a picture: 3,025 and 4,096 in published files
_PARTS: dict[str, Any] = {
    "qkv": tuple(f"attention.{part}_proj" for part in "qkv"),
    "out": ("attention.o_proj",),
    "up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": ("feed_forward.down_proj",),
    "norms": ("attention_norm", "ffn_norm"),
}


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for pictures of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    fields.refuse(vision_feature_layer=[None, -1])
    body, facts = _body(Fields(fields.table("vision_config"), "config.json vision_config"), str(config["model_type"]))
    text = Fields(fields.table("text_config"), "config.json text_config")
    width, merge = text.integer("hidden_size", 5120), fields.integer("spatial_merge_size", 2, high=64)
    given = preprocessor_fields(preprocessor, do_resize=(True, None), do_pad=(True, None))
    if others := set(given.table("size")) - {"longest_edge"}:
        raise ConfigError("field size", where=WHERE, expected="longest_edge alone", found=sorted(others)[0])
    longest = Fields(given.table("size"), f"{WHERE} size").integer("longest_edge", 1024, high=1 << 13)
    across = -(-longest // (body.patch * merge))
    if across * across > _MOST_ROWS:
        found = f"{across * across} of a picture of {longest} pixels"
        raise ConfigError("field longest_edge", where=WHERE, expected=f"at most {_MOST_ROWS} rows", found=found)
    if given.get("patch_size") not in (None, body.patch, {"height": body.patch, "width": body.patch}):
        raise ConfigError(
            "field patch_size", where=WHERE, expected=body.patch, found=repr(given.get("patch_size"))[:80]
        )
    info = VisionInfo(
        processor="pixtral",
        settings={"longest": longest, "resample": resample(given, 3), "patch": body.patch, "merge": merge},
        mean=channels(preprocessor, "image_mean", CLIP_MEAN),
        std=channels(preprocessor, "image_std", CLIP_STD),
        token=fields.integer("image_token_index", fields.integer("image_token_id", 10, low=0), low=0),
        rows=across * across,
        merged=merge * merge,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    return Tower(facts, body, _Projector(fields, facts.hidden_size, merge * merge, width, text), info)


def _body(fields: Fields, model_type: str) -> tuple[Pixtral, ModelFacts]:
    fields.refuse(num_channels=[None, 3], attention_dropout=[None, 0, 0.0])
    spec = EncoderSpec(
        hidden_size=fields.integer("hidden_size", 1024),
        intermediate_size=fields.integer("intermediate_size", 4096),
        num_heads=fields.integer("num_attention_heads", 16, high=4096),
        act=fields.get("hidden_act", "gelu"),
        eps=_EPS,
        gated=True,
        rms=True,
        attention_bias=False,
        mlp_bias=False,
        quantize=False,
        **_PARTS,
    )
    dim = spec.hidden_size // spec.num_heads
    if dim * spec.num_heads != spec.hidden_size or dim % 4:
        raise ConfigError(
            "field num_attention_heads", where=fields.where, found=spec.num_heads,
            expected=f"a divisor of {spec.hidden_size} that makes heads of a multiple of 4",
        )  # fmt: skip
    rope = Fields(fields.table("rope_parameters"), f"{fields.where} rope_parameters")
    rope.refuse(rope_type=[None, "default", "axial"])
    theta = rope.number("rope_theta", fields.number("rope_theta", 1e4, low=1.0), low=1.0)
    layers, patch = fields.integer("num_hidden_layers", 24, high=1024), fields.integer("patch_size", 16, high=1024)
    facts = ModelFacts(model_type, 0, spec.hidden_size, layers, 1, (), ())
    return Pixtral(spec, layers, patch, theta), facts


class Pixtral(nn.Module):
    """Projection, norm and layers; frequencies of even numbers turn with the row, the others with the column."""

    def __init__(self, spec: EncoderSpec, count: int, patch: int, theta: float) -> None:
        self.patch, dim = patch, spec.hidden_size // spec.num_heads
        self.patch_conv = Linear(3 * patch * patch, spec.hidden_size, quantize=False)
        self.ln_pre = RMSNorm(spec.hidden_size, spec.eps)
        self.transformer = _Layers(spec, count)
        self.frequencies = [theta ** (-2 * i / dim) for i in range(dim // 2)]

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        x = self.ln_pre(self.patch_conv(patches))
        rotation = axial_rotation(places, self.frequencies[0::2], self.frequencies[1::2])
        for layer in self.transformer.layers:
            x = layer(x, kv, rotation)
        return x


class _Layers(nn.Module):
    def __init__(self, spec: EncoderSpec, count: int) -> None:
        self.layers = nn.ModuleList([PreNormEncoderLayer(spec, i, first_norm=True) for i in range(count)])


class _Projector(nn.Module):
    """A norm, a matrix that joins the patches of a square (channel by channel), and two linear layers."""

    def __init__(self, fields: Fields, hidden_size: int, merged: int, width: int, text: Fields) -> None:
        self.hidden_size, self.merged = hidden_size, merged
        bias = fields.flag("multimodal_projector_bias", False)
        self.norm = RMSNorm(hidden_size, text.number("rms_norm_eps", 1e-5, low=0.0, high=1.0))
        self.joined = Linear(merged * hidden_size, hidden_size, quantize=False)
        self.joined.weight.attrs["sources"] = [["patch_merger.merging_layer.weight"]]
        self.linear_1 = Linear(hidden_size, width, bias, quantize=False)
        self.act = activation(fields.get("projector_hidden_act", "gelu"))
        self.linear_2 = Linear(width, width, bias, quantize=False)

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t * merged, hidden] -> one part [t, width]."""
        each = self.hidden_size
        x = op.reshape(self.norm(x), (t, self.merged, each))
        x = self.joined(op.reshape(op.permute_dims(x, [0, 2, 1]), (t, self.merged * each)))
        return [self.linear_2(self.act(self.linear_1(x)))]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: pictures of at most `image_size` pixels. Pixtral 12B itself joins no patches, and is refused."""
    for name in ("mm.patch_merger.weight", "mm.input_norm.weight"):
        if name not in file:
            raise file.error("spatial_merge_size", f"a tower with {name}", "none")
    check_eps(file, _EPS)
    vision = whole["vision_config"]
    vision |= {
        "hidden_act": "gelu" if file.flag("use_gelu", False) else "silu",
        "rope_parameters": {"rope_theta": file.number("rope.freq_base", 1e4)},
    }
    whole |= {
        "spatial_merge_size": file.integer("spatial_merge_size", 1),
        "image_token_index": file.token("[IMG]"),
        "multimodal_projector_bias": "mm.1.bias" in file,
    }
    preprocessor |= {"size": {"longest_edge": vision["image_size"]}, "resample": 3}


MMPROJ = Mmproj(
    "pixtral",
    dict.fromkeys(("llama", "mistral", "ministral3"), "mistral3"),
    _complete,
    {
        "v.patch_embd": "tower.model.patch_conv",
        "v.pre_ln": "tower.model.ln_pre",
        **in_layers(
            "tower.model.transformer.layers",
            {
                "ln1": "attention_norm",
                **{f"attn_{x}": f"attention.{x}_proj" for x in "qkv"},
                "attn_out": "attention.o_proj",
                "ln2": "ffn_norm",
                **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
            },
        ),
        "mm.input_norm": "tower.projector.norm",
        "mm.patch_merger": "tower.projector.patch_merger.merging_layer",
        "mm.1": "tower.projector.linear_1",
        "mm.2": "tower.projector.linear_2",
    },
    interleaved=("attn_q", "attn_k"),
)
