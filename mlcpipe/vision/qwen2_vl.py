"""What the towers of Qwen2-VL's kind share: facts of its processor, the axial RoPE of patches (Wang et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.manifest import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import Rotation
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.vision.processors.qwen2_vl import most_rows

_WHERE = "preprocessor_config.json"
# Of a picture, 2 megapixels for patches of 16: larger ones are shrunk, because the time of attention grows with the
# square, and its memory is in the plan of every bundle.
MOST_ROWS = 2048
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Fields with the values that change nothing here; those of the files' own names, kinds and types do not count.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_convert_rgb": (True, None),
    "do_resize": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "do_pad": (False, None),
    "do_center_crop": (False, None),
    "rescale_factor": (1 / 255, None),
    "input_data_format": (None,),
    "data_format": ("channels_first", None),
}


def patch_info(
    vision: Fields, preprocessor: Mapping[str, Any], token: int, width: int, *, patch: int, pixels: Sequence[int]
) -> VisionInfo:
    """What the manifest says of a tower with rows of `width` numbers, whose pages are not known yet.

    `patch` pixels of a side and `pixels` of a picture, at least and at most, are defaults. Raises ConfigError for
    fields that are not honoured, and for a processor that makes other patches than the tower reads.
    """
    fields = Fields(preprocessor, _WHERE)
    fields.refuse(**_NEUTRAL)
    names = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    size, merge, frames = (fields.integer(name, default, high=256) for name, default in names.items())
    for name, of_tower, found in (
        ("patch_size", "patch_size", size),
        ("merge_size", "spatial_merge_size", merge),
        ("temporal_patch_size", "temporal_patch_size", frames),
    ):
        expected = vision.integer(of_tower, names[name], high=256)
        if expected != found:
            raise ConfigError(f"field {name}", where=_WHERE, expected=f"the tower's {expected}", found=found)
    side = size * merge
    shortest, longest = _pixels(fields, pixels)
    longest = min(longest, MOST_ROWS * side * side)
    if shortest > longest:
        raise ConfigError("pixels of a picture", where=_WHERE, expected=f"at most {longest}", found=shortest)
    settings = {"patch": size, "merge": merge, "frames": frames, "shortest": shortest, "longest": longest}
    settings["resample"] = fields.integer("resample", 3, low=0, high=5)
    return VisionInfo(
        processor="qwen2_vl",
        settings=settings,
        mean=_channels(fields, "image_mean", _CLIP_MEAN),
        std=_channels(fields, "image_std", _CLIP_STD),
        token=token,
        rows=most_rows(side, shortest, longest),
        merged=merge * merge,
        numbers=3 * frames * size * size,
        places=4,
        width=width,
        page_bytes=1,
    )


def _pixels(fields: Fields, default: Sequence[int]) -> tuple[int, int]:
    """Pixels of a picture, at least and at most: of `size`, or of older files' own fields."""
    size = Fields(fields.table("size"), f"{_WHERE} size")
    if others := set(size.values) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ConfigError("field size", where=_WHERE, expected="numbers of pixels", found=sorted(others)[0])
    found = []
    for old, name, usual in zip(("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), default):
        of_size = size.integer(name, usual, high=1 << 32) if size.get(name) is not None else usual
        found.append(fields.integer(old, high=1 << 32) if fields.get(old) is not None else of_size)
    return found[0], found[1]


def _channels(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(fields.numbers(name, 3)) if fields.get(name) is not None else default


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
