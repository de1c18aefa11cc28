"""Qwen2-VL's tower (Wang et al. 2024), and what those after it share: patches of any number, axial RoPE, a merger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn import mrope
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec, PreNormEncoderLayer, Rotation, named
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import LayerNorm, RMSNorm
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import PART, Config, Mmproj, MmprojFile, check_eps, in_layers
from mlcpipe.vision.preprocessor import (
    CLIP_MEAN,
    CLIP_STD,
    MOST_FRAMES,
    WHERE,
    channels,
    preprocessor_fields,
    video_fields,
    video_info,
)
from mlcpipe.vision.processors.qwen2_vl import USUAL_ROWS, limited, most_rows

EPS = 1e-6
MOST_ROWS = 1 << 14  # of a picture that a library is compiled for: those of published files
_SIZED = {"do_resize": (True, None), "do_pad": (False, None)}  # as all processors of the family do


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for patches of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    whole = Fields(config)
    vision = Fields(whole.table("vision_config"), "config.json vision_config")
    hidden, ratio = vision.integer("embed_dim", 1280), vision.integer("mlp_ratio", 4, high=64)
    spec = axial_spec(
        vision, hidden, ratio * hidden, "quick_gelu", up=("mlp.fc1",), down=("mlp.fc2",), num_heads=16
    )  # fmt: skip
    layers, width = vision.integer("depth", 32, high=1024), vision.integer("hidden_size", 3584)
    text = text_of(config, vision, "hidden_size", width)
    token = whole.integer("image_token_id", 151655, low=0)
    info = patch_info(vision, preprocessor, token, width, patch=14)
    facts = ModelFacts(str(config["model_type"]), 0, hidden, layers, info.rows * info.merged, (), ())
    body = AxialEncoder(spec, layers, info.numbers, axial_theta(vision), bias=False)
    projector = Mergers(Merger(hidden, info.merged, width, names=("ln_q", "mlp.0", "mlp.2")))
    layout = mrope.sectioned(mrope.sections(text, (16, 24, 24)))
    return Tower(facts, body, projector, info, layout, limited(info, USUAL_ROWS))


def text_of(config: Mapping[str, Any], vision: Fields, name: str, width: int) -> Mapping[str, Any]:
    """The text's fields, which older files have beside the tower's. Raises ConfigError if the tower's field `name`, the
    width of its rows, is not the text's.
    """
    text = Fields(config).table("text_config") or config
    of_text = Fields(text, "config.json text_config").integer("hidden_size", width)
    if width != of_text:
        raise ConfigError(f"field {name}", where=vision.where, expected=f"the text's {of_text}", found=width)
    return text


def layers_of(vision: Fields, name: str, layers: int, default: list[int], most: int) -> tuple[int, ...]:
    """Some of a tower's layers, at most `most` of them, in order. Raises ConfigError for other ones than it has."""
    found = vision.get(name, default)
    good = isinstance(found, list) and len(found) <= most and all(type(one) is int for one in found)
    if not good or any(not a < b < layers for a, b in pairwise([-1, *found])):
        expected = f"at most {most} layers of {layers}, in order"
        raise ConfigError(f"field {name}", where=vision.where, expected=expected, found=found)
    return tuple(found)


def axial_spec(
    vision: Fields, hidden: int, intermediate: int, act: str, *, num_heads: int, up: tuple[str, ...], down: tuple[str]
) -> EncoderSpec:
    """The layers of a `vision_config`, whose MLPs have the matrices `up` and `down`. Raises ConfigError."""
    vision.refuse(in_channels=[None, 3])
    heads = vision.integer("num_heads", num_heads, high=4096)
    if hidden % (4 * heads):
        expected = f"a divisor of {hidden}, for heads of a multiple of 4"
        raise ConfigError("field num_heads", where=vision.where, expected=expected, found=heads)
    return EncoderSpec(
        hidden, intermediate, heads, vision.get("hidden_act", act), EPS, quantize=False, qkv=("attn.qkv",),
        out=("attn.proj",), up=up, down=down, norms=("norm1", "norm2"),
    )  # fmt: skip


def axial_theta(vision: Fields) -> float:
    """The base of the frequencies of patches."""
    rope = Fields(vision.table("rope_parameters"), f"{vision.where} rope_parameters")
    rope.refuse(rope_type=["axial", None])
    return rope.number("rope_theta", 1e4, low=1.0)


class PatchEmbed(nn.Module):
    """The projection of patches, named as in the checkpoint."""

    def __init__(self, numbers: int, hidden_size: int, bias: bool) -> None:
        self.proj = Linear(numbers, hidden_size, bias, quantize=False)


class AxialEncoder(nn.Module):
    """Embeddings of patches, and layers -> hidden states after the layers `deep`, and after the last one."""

    def __init__(
        self, spec: EncoderSpec, count: int, numbers: int, theta: float, *, bias: bool, deep: Sequence[int] = ()
    ) -> None:
        self.spec, self.deep, self.theta = spec, deep, theta
        self.patch_embed = PatchEmbed(numbers, spec.hidden_size, bias)
        self.blocks = nn.ModuleList([PreNormEncoderLayer(spec, i, first_norm=True) for i in range(count)])

    def embedded(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [m, numbers], places i32[m, 4] -> [m, hidden]."""
        return self.patch_embed.proj(patches)

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> list[Tensor]:
        """patches [m, numbers], places i32[m, 4] -> hidden states [m, hidden] each."""
        x, kept = self.embedded(patches, places), []
        rotation = axial_rotation(places, self.spec.hidden_size // self.spec.num_heads, self.theta)
        for index, layer in enumerate(self.blocks):
            x = layer(x, kv, rotation)
            kept += [x] if index in self.deep else []
        return [*kept, x]


class Merger(nn.Module):
    """`merged` patches that follow each other -> one row; they are normalized each, or with `together` as one.

    `rms`: by an RMS norm. `names` are the checkpoint's of the norm and the two matrices.
    """

    def __init__(
        self, hidden_size: int, merged: int, width: int, *, together: bool = False,
        rms: bool = False, names: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2"),
    ) -> None:  # fmt: skip
        self.size, self.together = merged * hidden_size, together
        self.norm = named((RMSNorm if rms else LayerNorm)(self.size if together else hidden_size, EPS), names[0])
        self.linear_fc1 = named(Linear(self.size, self.size, True, quantize=False), names[1])
        self.linear_fc2 = named(Linear(self.size, width, True, quantize=False), names[2])

    def forward(self, x: Tensor, t: tirx.Expr) -> Tensor:
        """[t * merged, hidden] -> [t, width]."""
        shape = (t, self.size)
        x = self.norm(op.reshape(x, shape)) if self.together else op.reshape(self.norm(x), shape)
        return self.linear_fc2(op.gelu(self.linear_fc1(x)))


class Mergers(nn.Module):
    """Rows of the last layer's hidden states, then those of each of the others."""

    def __init__(self, merger: Merger, deep: Sequence[Merger] = ()) -> None:
        self.merger = merger
        self.deepstack_merger_list = nn.ModuleList([*deep])

    def forward(self, states: list[Tensor], t: tirx.Expr) -> list[Tensor]:
        """Hidden states [t * merged, hidden] of `AxialEncoder` -> parts [t, width]."""
        *deep, last = states
        return [self.merger(last, t), *(merger(x, t) for merger, x in zip(self.deepstack_merger_list, deep))]


def patch_info(
    vision: Fields, preprocessor: Mapping[str, Any], token: int, width: int, *, patch: int,
    processor: str = "qwen2_vl", pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280), all_frames: bool = False,
) -> VisionInfo:  # fmt: skip
    """What the manifest says of a tower with rows of `width` numbers, whose pages are not known yet, for the largest
    pictures that its library is compiled for.

    `patch` is the tower's default, in pixels of a side, and `pixels` are the processor's bounds; `all_frames`: which
    count those of all frames of a patch. Raises ConfigError for fields that are not honoured, and for a
    processor that makes other patches than the tower reads.
    """
    fields = preprocessor_fields(preprocessor, **_SIZED)
    sizes = []
    for name, default, of_tower, usual in (
        ("patch_size", 14, "patch_size", patch),
        ("merge_size", 2, "spatial_merge_size", 2),
        ("temporal_patch_size", 2, "temporal_patch_size", 2),
    ):
        found, expected = fields.integer(name, default, high=256), vision.integer(of_tower, usual, high=256)
        if expected != found:
            raise ConfigError(f"field {name}", where=WHERE, expected=f"the tower's {expected}", found=found)
        sizes.append(found)
    size, merge, frames = sizes
    side = size * merge
    shortest, longest = _pixels(fields, pixels)
    counted = frames if all_frames else 1
    longest = min(longest, counted * MOST_ROWS * side * side)
    if shortest > longest:
        raise ConfigError("pixels of a picture", where=WHERE, expected=f"at most {longest}", found=shortest)
    settings = {
        "patch": size, "merge": merge, "frames": frames, "shortest": shortest, "longest": longest,
        "most_pixels": longest, "counted": counted, "resample": fields.integer("resample", 3, low=0, high=5),
    }  # fmt: skip
    return VisionInfo(
        processor=processor,
        settings=settings,
        mean=channels(preprocessor, "image_mean", CLIP_MEAN),
        std=channels(preprocessor, "image_std", CLIP_STD),
        token=token,
        rows=most_rows(side, shortest / counted, longest / counted),
        merged=merge * merge,
        numbers=3 * frames * size * size,
        places=4,
        width=width,
        page_bytes=1,
    )


def _pixels(fields: Fields, default: Sequence[int]) -> tuple[int, int]:
    """Pixels of a picture, at least and at most: of `size`, or of older files' own fields."""
    size = Fields(fields.table("size"), f"{fields.where} size")
    if others := set(size.values) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ConfigError("field size", where=fields.where, expected="numbers of pixels", found=sorted(others)[0])
    found = []
    for old, name, usual in zip(("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default):
        of_size = size.integer(name, usual, high=1 << 32) if size.get(name) is not None else usual
        found.append(fields.integer(old, high=1 << 32) if fields.get(old) is not None else of_size)
    return found[0], found[1]


def with_video(info: VisionInfo, preprocessor: Mapping[str, Any]) -> VisionInfo:
    """The tower's, with how Qwen3-VL takes frames of a video. Raises ConfigError for fields that are not honoured, and
    for videos with other patches than pictures have.
    """
    fields = video_fields(preprocessor, num_frames=(None,), **_SIZED)
    of, where = info.settings, fields.where
    side = of["patch"] * of["merge"]
    for name, own in (("patch_size", "patch"), ("merge_size", "merge"), ("temporal_patch_size", "frames")):
        if fields.integer(name, of[own]) != of[own]:
            raise ConfigError(f"field {name}", where=where, expected=f"the tower's {of[own]}", found=fields.get(name))
    shortest, longest = _pixels(fields, (128 * 32 * 32, 32 * 32 * 768))
    most = min(longest, of["frames"] * MOST_ROWS * side * side)
    if shortest > most:
        raise ConfigError("pixels of a video", where=where, expected=f"at most {most}", found=shortest)
    least = fields.integer("min_frames", 4, high=MOST_FRAMES)
    capped = fields.flag("cap_pixels_per_frame", False)
    settings = {
        "shortest": shortest, "longest": longest, "least_frames": least,
        "most_frames": fields.integer("max_frames", 768, low=least, high=MOST_FRAMES),
        "capped_rows": fields.integer("max_video_tokens", 768) if capped else 0,
        "resample": fields.integer("resample", 3, low=1, high=3),
    }  # fmt: skip
    fps = fields.number("fps", 2.0, low=1e-3, high=1000.0)
    return info.model_copy(update={"video": video_info(fields, fps, settings)})


def axial_rotation(places: Tensor, head_dim: int, theta: float) -> Rotation:
    """Cosines and sines f32[m, head_dim / 2] of patches at places i32[m, 4]: half of the pairs turn by the row, half by
    the column, with the same frequencies.
    """
    quarter = head_dim // 4
    powers = np.power(np.float32(theta), np.arange(0, 2 * quarter, 2, dtype=np.float32) / np.float32(2 * quarter))
    inverse = tuple(float(one) for one in (np.float32(1) / powers).astype(np.float32))

    def turned(at: te.Tensor) -> te.Tensor:
        def number(axis: tirx.Var, i: tirx.Var) -> tirx.PrimExpr:
            return at[i, axis]

        return te.compute((2, at.shape[0]), number, name="axes")

    positions = op.tensor_expr_op(turned, "axes", [places])
    return cos_sin(Rope(4 * quarter, theta, inverse * 2), positions, None, [0] * quarter + [1] * quarter)


def complete_mmproj(
    file: MmprojFile, whole: Config, preprocessor: Config, shortest: int, longest: int, picture: str = "<|image_pad|>"
) -> None:
    """The fields of Qwen's towers, and those of pictures as published, if the file does not say how many pixels.

    `picture` is the text of a picture's token.
    """
    vision = whole["vision_config"]
    if "mrope_section" not in (whole["text_config"].get("rope_parameters") or {}):
        raise ConfigError(
            "the text does not see", expected="a text with rope.dimension_sections, such as that of Qwen3-VL",
            found="none", next_step="take the text that the mmproj file was made for",
        )  # fmt: skip
    merge, patch = file.integer("spatial_merge_size", 2), vision["patch_size"]
    vision |= {
        "depth": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "spatial_merge_size": merge,
    }
    whole["image_token_id"] = file.token(picture)
    preprocessor |= {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": file.integer("image_min_pixels", shortest),
            "longest_edge": file.integer("image_max_pixels", longest),
        },
        "resample": 3,
    }


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    vision = whole["vision_config"]
    hidden, width = vision["hidden_size"], vision.pop("intermediate_size")
    if not width or width % hidden:
        raise file.error("embedding_length", f"a divisor of {width}, the rows of v.blk.0.ffn_up.weight", hidden)
    check_eps(file, EPS)
    vision |= {"embed_dim": hidden, "mlp_ratio": width // hidden, "hidden_size": file.integer("projection_dim")}
    complete_mmproj(file, whole, preprocessor, 56 * 56, 14 * 14 * 4 * 16384)


MMPROJ_NAMES = {
    "v.patch_embd": "tower.model.patch_embed.proj",
    **in_layers(
        "tower.model.blocks",
        {
            "ln1": "norm1",
            "attn_qkv": "attn.qkv",
            **{f"attn_{x}": f"attn.qkv{PART}{i}" for i, x in enumerate("qkv")},
            "attn_out": "attn.proj",
            "ln2": "norm2",
        },
    ),
}
MERGER_NAMES = {
    "v.post_ln": "tower.projector.merger.ln_q",
    **{f"mm.{i}": f"tower.projector.merger.mlp.{i}" for i in (0, 2)},
}
MMPROJ = Mmproj(
    "qwen2vl_merger",
    {"qwen2": "qwen2_vl"},
    _complete,
    {
        **MMPROJ_NAMES,
        **MERGER_NAMES,
        **in_layers("tower.model.blocks", {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    },
)
