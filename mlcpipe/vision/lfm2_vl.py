"""LFM2-VL (Liquid AI 2025): SigLIP 2 for pictures of their own aspect, pixel unshuffle, two matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import LayerNorm
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile
from mlcpipe.vision.place_table import PlaceTable
from mlcpipe.vision.preprocessor import WHERE, channels, preprocessor_fields, resample
from mlcpipe.vision.siglip import MMPROJ_NAMES, siglip

_DEFAULTS = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}  # of transformers' Siglip2VisionConfig
_BILINEAR = 2
_MOST_TILES, _MOST_ROWS = 64, 4096


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for pictures of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    vision = Fields({**_DEFAULTS, **fields.table("vision_config")}, "config.json vision_config")
    places, patch = vision.integer("num_patches", 256, high=1 << 16), vision.integer("patch_size", 16, high=1024)
    side = math.isqrt(places)
    if side * side != places:
        raise ConfigError("field num_patches", where=vision.where, expected="a square", found=places)
    square = {**vision.values, "image_size": side * patch}
    facts, body = siglip(Fields(square, vision.where), str(config["model_type"]))
    body.embeddings = _Embeddings(facts.hidden_size, patch, side)
    width = Fields(fields.table("text_config"), "config.json text_config").integer("hidden_size", 2560)
    merge = fields.integer("downsample_factor", 2, high=64)
    settings = _settings(preprocessor, patch, merge)
    info = VisionInfo(
        processor="lfm2_vl",
        settings={**settings, "patch": patch, "merge": merge},
        mean=channels(preprocessor, "image_mean"),
        std=channels(preprocessor, "image_std"),
        token=fields.integer("image_token_id", 396, low=0),
        rows=max(settings["most_tokens"], (settings["tile"] // (patch * merge)) ** 2),
        merged=merge * merge,
        numbers=3 * patch**2,
        places=4,
        width=width,
        page_bytes=1,
    )
    return Tower(facts, body, _Projector(fields, merge * merge * facts.hidden_size, width), info)


def _settings(preprocessor: Mapping[str, Any], patch: int, merge: int) -> dict[str, int]:
    """The settings of a preprocessor_config.json. Raises ConfigError for a field that is not honoured."""
    fields = preprocessor_fields(
        preprocessor, do_resize=(True, None), do_pad=(True, None), encoder_patch_size=(patch, None),
        downsample_factor=(merge, None), max_pixels_tolerance=(2, 2.0, None), resample=(_BILINEAR, None),
    )  # fmt: skip
    tile = fields.integer("tile_size", 512, high=4096)
    if tile % (patch * merge):
        raise ConfigError("field tile_size", where=WHERE, expected=f"a multiple of {patch * merge}", found=tile)
    most = fields.integer("max_tiles", 10, high=_MOST_TILES)
    tokens = fields.integer("max_image_tokens", 256, high=_MOST_ROWS)
    return {
        "tile": tile, "resample": resample(fields, _BILINEAR), "most": most,
        "least": fields.integer("min_tiles", 2, high=most), "most_tokens": tokens,
        "least_tokens": fields.integer("min_image_tokens", 64, high=tokens),
        "splits": int(fields.flag("do_image_splitting", True)), "thumbnail": int(fields.flag("use_thumbnail", True)),
    }  # fmt: skip


class _Embeddings(nn.Module):
    """A patch's projection plus the vector of its place in a table that is resized to the picture's patches."""

    def __init__(self, hidden_size: int, patch: int, side: int) -> None:
        self.patch_embedding = Linear(3 * patch * patch, hidden_size, True, quantize=False)
        self.position_embedding = PlaceTable(side, hidden_size, resized)

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m, 4] -> [m, hidden]."""
        return self.position_embedding(self.patch_embedding(patches), places)


def resized(side: int, table: te.Tensor, places: te.Tensor) -> te.Tensor:
    """As torch does with mode bilinear and antialias, whose pixels are areas: weights of the table's rows and columns
    are triangles, wider where the picture has fewer patches.
    """
    one = tirx.const(1.0, "float32")

    def triangle(axis: tirx.PrimExpr, i: tirx.Var, k: tirx.PrimExpr) -> tirx.PrimExpr:
        scale = tirx.const(float(side), "float32") / places[i, axis + 2].astype("float32")
        centre = (places[i, axis].astype("float32") + 0.5) * scale
        return tirx.max(one - tirx.abs(k.astype("float32") + 0.5 - centre) / tirx.max(scale, one), 0.0)

    shape = (2, places.shape[0], side)
    weights = te.compute(shape, triangle, name="triangles")
    k = te.reduce_axis((0, side), name="k")
    total = te.compute(shape[:2], lambda axis, i: te.sum(weights[axis, i, k], axis=k), name="total")
    r, c = te.reduce_axis((0, side), name="r"), te.reduce_axis((0, side), name="c")
    found = te.compute(
        (places.shape[0], table.shape[1]),
        lambda i, j: te.sum(weights[0, i, r] * weights[1, i, c] * table[r * side + c, j], axis=[r, c]),
        name="found",
    )
    return te.compute(found.shape, lambda i, j: found[i, j] / (total[0, i] * total[1, i]), name="resized")


class _Projector(nn.Module):
    """A norm over the patches of a square, and two linear layers."""

    def __init__(self, fields: Fields, in_features: int, width: int) -> None:
        hidden, bias = fields.integer("projector_hidden_size", 2560), fields.flag("projector_bias", True)
        self.in_features = in_features
        self.layer_norm = LayerNorm(in_features, 1e-5) if fields.flag("projector_use_layernorm", True) else None
        self.linear_1 = Linear(in_features, hidden, bias, quantize=False)
        self.act = activation(fields.get("projector_hidden_act", "gelu"))
        self.linear_2 = Linear(hidden, width, bias, quantize=False)

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t * merged, hidden] -> one part [t, width]."""
        x = op.reshape(x, (t, self.in_features))
        x = x if self.layer_norm is None else self.layer_norm(x)
        return [self.linear_2(self.act(self.linear_1(x)))]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: 64 to 256 rows, or 2 to 10 tiles of 512 pixels."""
    vision = whole["vision_config"]
    vision["num_patches"] = file.shape("v.position_embd.weight")[0]
    whole |= {
        "downsample_factor": file.integer("projector.scale_factor", 2),
        "image_token_id": file.token("<image>"),
        "projector_hidden_size": file.shape("mm.1.weight")[0],
        "projector_bias": "mm.1.bias" in file,
        "projector_use_layernorm": "mm.input_norm.weight" in file,
    }
    preprocessor["resample"] = _BILINEAR


MMPROJ = Mmproj(
    "lfm2",
    dict.fromkeys(("lfm2", "lfm2_moe"), "lfm2_vl"),
    _complete,
    {
        **MMPROJ_NAMES,
        "mm.input_norm": "tower.projector.layer_norm",
        "mm.1": "tower.projector.linear_1",
        "mm.2": "tower.projector.linear_2",
    },
    channels_last=True,
)
