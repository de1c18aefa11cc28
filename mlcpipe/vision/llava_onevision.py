"""LLaVA-OneVision (Li et al. 2024): SigLIP without its last norm, two matrices, and a vector that ends lines."""

from __future__ import annotations

import math
import re
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
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.preprocessor import CLIP_MEAN, CLIP_STD, WHERE, channels, preprocessor_fields, resample, side
from mlcpipe.vision.processors.decode import MAX_PIXELS
from mlcpipe.vision.processors.llava_onevision import KEPT_RATIO, MOST_TILES, grid_settings
from mlcpipe.vision.siglip import siglip

_MOST_GRIDS = 256
_ASPECT = re.compile(r"anyres_max_([1-9][0-9]?)")


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for tiles of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    fields.refuse(vision_feature_layer=[None, -1], vision_feature_select_strategy=[None, "full"])
    vision = Fields(fields.table("vision_config"), "config.json vision_config")
    vision.refuse(model_type=[None, "siglip_vision_model"])
    facts, body = siglip(vision, str(config["model_type"]), final_norm=False)
    width = Fields(fields.table("text_config"), "config.json text_config").integer("hidden_size", 4096)
    given = preprocessor_fields(preprocessor, do_resize=(True, None), do_pad=(True, None), crop_size=(None,))
    pixels = side(given, "size", 384)
    if pixels != vision.get("image_size", 224) or pixels // body.patch != body.side:
        raise ConfigError("field size", where=WHERE, expected=f"{body.side} patches of {body.patch}", found=pixels)
    grids = _grids(given, pixels)
    if fields.get("image_grid_pinpoints") is not None and _grids(fields, pixels) != grids:
        raise ConfigError("field image_grid_pinpoints", where=WHERE, expected="those of config.json", found="others")
    aspect = fields.get("vision_aspect_ratio", "anyres_max_9")
    known = _ASPECT.fullmatch(aspect) if isinstance(aspect, str) else None
    if known is None:
        raise ConfigError("field vision_aspect_ratio", where="config.json", expected="anyres_max_9", found=repr(aspect))
    most, rows = int(known[1]), body.side**2
    packed = max(min(r * c * rows, math.floor(KEPT_RATIO**2 * most * rows)) + r * body.side for r, c in grids)
    settings = {"side": pixels, "resample": resample(given, 3), "patch": body.patch, "merge": 1, "most": most}
    info = VisionInfo(
        processor="llava_onevision",
        settings=settings | grid_settings(grids),
        mean=channels(preprocessor, "image_mean", CLIP_MEAN),
        std=channels(preprocessor, "image_std", CLIP_STD),
        token=fields.integer("image_token_index", fields.integer("image_token_id", 151646, low=0), low=0),
        packed=packed,
        rows=rows,
        merged=1,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    return Tower(facts, body, _Projector(fields, facts.hidden_size, width), info)


def _grids(fields: Fields, pixels: int) -> list[tuple[int, int]]:
    """(rows, columns) of tiles, of `image_grid_pinpoints`: heights and widths. Raises ConfigError."""
    found = fields.get("image_grid_pinpoints")
    if found is None:
        return [(r, c) for r in range(1, 7) for c in range(1, 7)]
    good = isinstance(found, list) and 0 < len(found) <= _MOST_GRIDS
    grids = []
    for one in found if good else [None]:
        sizes = one if isinstance(one, list) and len(one) == 2 and all(type(size) is int for size in one) else [0, 0]
        rows, columns = (size // pixels for size in sizes)
        if sizes != [rows * pixels, columns * pixels] or min(sizes) < 1 or rows * columns > MAX_PIXELS // pixels**2:
            good = False
        grids.append((rows, columns))
    if not good or max(map(max, grids)) >= MOST_TILES:
        expected = (
            f"up to {_MOST_GRIDS} heights and widths, multiples of {pixels} up to {MAX_PIXELS >> 20} million pixels"
        )
        raise ConfigError("field image_grid_pinpoints", where=fields.where, expected=expected, found=str(found)[:80])
    return grids


class _Projector(nn.Module):
    """Two linear layers; the last row of a call is the vector that ends lines."""

    def __init__(self, fields: Fields, hidden_size: int, width: int) -> None:
        bias = fields.flag("multimodal_projector_bias", True)
        self.linear_1 = Linear(hidden_size, width, bias, quantize=False)
        self.act = activation(fields.get("projector_hidden_act", "gelu"))
        self.linear_2 = Linear(width, width, bias, quantize=False)
        self.image_newline = nn.Parameter((width,))

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t, hidden] -> one part [t, width]."""
        rows = self.linear_2(self.act(self.linear_1(x)))

        def ended(given: te.Tensor, newline: te.Tensor) -> te.Tensor:
            def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
                return tirx.if_then_else(i == given.shape[0] - 1, newline[j].astype(given.dtype), given[i, j])

            return te.compute(given.shape, element, name="ended")

        return [op.tensor_expr_op(ended, "ended", [rows, self.image_newline])]
