"""Gemma 3 (Gemma Team 2025): SigLIP, the mean of squares of patches, a norm and one matrix; without pan and scan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile
from mlcpipe.vision.pooled import mean_of
from mlcpipe.vision.preprocessor import WHERE, channels, preprocessor_fields, resample, side
from mlcpipe.vision.siglip import MMPROJ_NAMES, siglip

_BEGIN, _END = "<start_of_image>", "<end_of_image>"


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for squares of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    facts, body = siglip(Fields(fields.table("vision_config"), "config.json vision_config"), str(config["model_type"]))
    text = Fields(fields.table("text_config"), "config.json text_config")
    width, rows = text.integer("hidden_size", 2304), fields.integer("mm_tokens_per_image", 256, high=1 << 14)
    across = math.isqrt(rows)
    merge = body.side // across if across else 0
    if across * across != rows or not merge or merge * across != body.side:
        raise ConfigError(
            "field mm_tokens_per_image", where="config.json", expected=f"the square of a divisor of {body.side}",
            found=rows,
        )  # fmt: skip
    window = text.optional_integer("sliding_window", 4096)
    if window is not None and window < rows:
        raise ConfigError(
            "field sliding_window", where=text.where, expected=f"at least the {rows} rows of a picture", found=window
        )
    given = preprocessor_fields(
        preprocessor, do_resize=(True, None), do_pan_and_scan=(False, None), image_seq_length=(rows, None)
    )
    pixels = side(given, "size", 224)
    if pixels // body.patch != body.side:
        raise ConfigError(
            "field size", where=WHERE, expected=f"pixels that make {body.side} patches of {body.patch}", found=pixels
        )
    info = VisionInfo(
        processor="square",
        settings={"side": pixels, "resample": resample(given, 2), "patch": body.patch, "merge": merge},
        mean=channels(preprocessor, "image_mean"),
        std=channels(preprocessor, "image_std"),
        token=fields.integer("boi_token_index", 255999, low=0),
        name=_BEGIN,
        around=("\n\n", f"{_END}\n\n"),
        ahead="all",
        rows=rows,
        merged=merge * merge,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    return Tower(facts, body, _Projector(facts.hidden_size, merge * merge, width, body.eps), info)


class _Projector(nn.Module):
    """mm_soft_emb_norm of the mean of a square's patches, times mm_input_projection_weight."""

    def __init__(self, hidden_size: int, merged: int, width: int, eps: float) -> None:
        self.hidden_size, self.merged = hidden_size, merged
        self.mm_soft_emb_norm = RMSNorm(hidden_size, eps, 1.0)
        self.projection = Linear(hidden_size, width, quantize=False)
        self.projection.weight.attrs["sources"] = [["mm_input_projection_weight"]]

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t * merged, hidden] -> one part [t, width]."""
        x = op.reshape(x, (t, self.merged * self.hidden_size))
        x = op.tensor_expr_op(lambda given: mean_of(given, self.merged), "mean_of", [x])
        return [self.projection(self.mm_soft_emb_norm(x))]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: squares of the tower's size, bilinear."""
    pixels, patch = whole["vision_config"]["image_size"], whole["vision_config"]["patch_size"]
    whole["mm_tokens_per_image"] = (pixels // patch // file.integer("projector.scale_factor", 4)) ** 2
    whole["boi_token_index"] = file.token(_BEGIN)
    file.token(_END)
    preprocessor |= {"size": {"height": pixels, "width": pixels}, "resample": 2}


MMPROJ = Mmproj(
    "gemma3",
    {"gemma3_text": "gemma3"},
    _complete,
    {
        **MMPROJ_NAMES,
        "mm.soft_emb_norm": "tower.projector.mm_soft_emb_norm",
        "mm.input_projection.weight": "tower.projector.mm_input_projection_weight",
    },
    added={"mm.soft_emb_norm.weight": 1.0},
)
