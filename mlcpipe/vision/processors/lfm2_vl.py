"""LFM2-VL's pictures: of their own aspect, or tiles of the closest one with a smaller picture of the whole.

The numbers are those of transformers' `image_processing_lfm2_vl.py`, whose resizing is torch's of bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import UsageError
from mlcpipe.vision.processors.internvl import grid_of
from mlcpipe.vision.processors.picture import Floats, Ints, Picture
from mlcpipe.vision.processors.pixels import squares
from mlcpipe.vision.processors.torch_resize import bilinear

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
_TOLERANCE = 2  # times the pixels of the most tokens are one tile


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The tiles of an RGB image. Raises UsageError for one of an aspect that makes too many rows."""
    of, pixels = info.settings, np.asarray(image)
    side, tile = of["patch"] * of["merge"], of["tile"]
    height, width = _whole_size(image.height, image.width, side, of["least_tokens"], of["most_tokens"])
    rows = columns = 1
    near = [max(of["patch"], round(size / side) * side) for size in (image.height, image.width)]
    large = near[0] * near[1] > of["most_tokens"] * side * side * _TOLERANCE
    split = large and of["splits"] and not of["least"] == of["most"] == 1
    if split:
        columns, rows = grid_of(image.height, image.width, tile, of["least"], of["most"])
    sizes = [(tile, tile)] * (rows * columns if split else 0)
    if not split or (of["thumbnail"] and rows * columns > 1):
        sizes.append((height, width))
    counts = tuple(high * wide // (side * side) for high, wide in sizes)
    if max(counts) > info.rows:  # before the work
        raise UsageError(
            "the picture", expected=f"sides that make at most {info.rows} rows",
            found=f"{image.width} x {image.height}", next_step="crop it",
        )  # fmt: skip
    tiles: list[Pixels] = []
    if split:
        whole = bilinear(pixels, rows * tile, columns * tile)
        for r in range(rows):
            tiles += [whole[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for c in range(columns)]
    if len(tiles) < len(sizes):
        tiles.append(bilinear(pixels, height, width))
    return Picture(info, tuple(tiles), _layout(rows, columns, counts), counts)


def _layout(rows: int, columns: int, counts: tuple[int, ...]) -> tuple[str | int, ...]:
    """Texts, and numbers of rows of the tower's, as they follow each other in a prompt."""
    if rows * columns == 1:
        return ("<|image_start|>", counts[0], "<|image_end|>")
    parts: list[str | int] = ["<|image_start|>"]
    for index in range(rows * columns):
        parts += [f"<|img_row_{index // columns + 1}_col_{index % columns + 1}|>", counts[index]]
    if len(counts) > rows * columns:
        parts += ["<|img_thumbnail|>", counts[-1]]
    return (*parts, "<|image_end|>")


def patches(tile: Pixels, info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [height, width, 3] -> patches f32[t, merged * numbers], and their places i32[t, merged * 4].

    A patch is [pixel row, pixel column, 3]; its place is its row, its column, and how many there are of them.
    """
    merge = info.settings["merge"]
    rows, columns = (size // info.settings["patch"] for size in tile.shape[:2])
    row, column = np.indices((rows, columns), np.int32)
    place = np.stack([row, column, np.full_like(row, rows), np.full_like(row, columns)], axis=-1)
    blocks = place.reshape(rows // merge, merge, columns // merge, merge, 4).transpose(0, 2, 1, 3, 4)
    made = squares(tile, info, channels_last=True, fused=True)
    return made, np.ascontiguousarray(blocks.reshape(len(made), info.merged * 4))


def _whole_size(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in multiples of `side`, of `least` to `most` squares if that is possible."""
    rows, columns = (max(1, round(size / side)) for size in (height, width))
    if rows * columns > most:
        shrink = math.sqrt((height * width) / (most * side * side))
        return tuple(max(side, math.floor(size / shrink / side) * side) for size in (height, width))  # type: ignore[return-value]
    if rows * columns < least:
        grow = math.sqrt(least * side * side / (height * width))
        return tuple(math.ceil(size * grow / side) * side for size in (height, width))  # type: ignore[return-value]
    return rows * side, columns * side
