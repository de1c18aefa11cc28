"""Qwen2-VL's pictures, and those of families after it: patches of any number, in blocks that become one row each.

The numbers are those of transformers' `image_processing_pil_qwen2_vl.py`, whose resizing is Pillow's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import UsageError
from mlcpipe.vision.processors.picture import Floats, Ints, Picture, normalized

if TYPE_CHECKING:
    from PIL import Image

MOST_RATIO = 200  # of the sides
# Of a picture, 2 megapixels for patches of 16, if an engine is not asked for larger ones: the time of attention grows
# with the square, and the memory of all is in the plan.
USUAL_ROWS = 2048


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The one tile of an RGB image. Raises UsageError for sides that differ more than 200 times."""
    return picture_of(image, info, image.height, image.width)


def picture_of(image: Image.Image, info: VisionInfo, height: int, width: int, frames: int = 1) -> Picture:
    """The one tile of an RGB image, of the size for one of this height and width, whose bounds are of `frames` of it.

    Raises UsageError as `prepare`.
    """
    from PIL import Image as images

    of = info.settings
    side = of["patch"] * of["merge"]
    height, width = smart_resize(height, width, side, of["shortest"], of["longest"], frames, frames)
    return picture_of_tile(np.asarray(image.resize((width, height), images.Resampling(of["resample"]))), info)


def picture_of_tile(tile: NDArray[np.uint8], info: VisionInfo) -> Picture:
    """The picture of one tile uint8 [height, width, 3], or of frames of it uint8 [frames, height, width, 3]."""
    rows, columns = (size // (info.settings["patch"] * info.settings["merge"]) for size in tile.shape[-3:-1])
    row, column = (at.reshape(-1) for at in np.indices((rows, columns), np.int32))
    return Picture(
        info, (tile,), (rows * columns,), counts=(rows * columns,),
        positions=np.stack([np.zeros_like(row), row, column]), advance=max(rows, columns),
    )  # fmt: skip


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [height, width, 3] -> patches f32[rows, merged * numbers], and their places i32[rows, merged * 4].

    Patches of a row of the result lie in a square, row by row; a patch is [3, frame, pixel row, pixel column], with
    the same pixels in all frames, or those of a tile [frames, height, width, 3] of a video. Its place is its row, its
    column, and how many there are of them.
    """
    of = info.settings
    patch, merge = of["patch"], of["merge"]
    rows, columns = (side // patch for side in tile.shape[-3:-1])
    blocks = (rows // merge, merge, columns // merge, merge)
    colours = info.video if tile.ndim == 4 and info.video is not None else info
    pixels = normalized(tile, colours.mean, colours.std, fused=tile.ndim == 4)
    pixels = np.broadcast_to(pixels, (of["frames"], *tile.shape[-3:]))
    parts = pixels.reshape(of["frames"], blocks[0], merge, patch, blocks[2], merge, patch, 3)
    parts = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    row, column = np.indices((rows, columns), np.int32).reshape(2, *blocks).transpose(0, 1, 3, 2, 4)
    place = np.stack([row, column, np.full_like(row, rows), np.full_like(row, columns)], axis=-1)
    count = blocks[0] * blocks[2]
    made = np.ascontiguousarray(parts).reshape(count, info.merged * info.numbers)
    return made, np.ascontiguousarray(place.reshape(count, info.merged * info.places))


def smart_resize(
    height: int, width: int, side: int, shortest: int, longest: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """(height, width) in multiples of `side`, so that `frames` of this size, of which `counted` are compared, have
    `shortest` to `longest` pixels if that is possible.

    Raises UsageError for sides that differ more than MOST_RATIO times.
    """
    if max(height, width) > MOST_RATIO * min(height, width):
        raise UsageError(
            "the picture", expected=f"sides that differ at most {MOST_RATIO} times", found=f"{width} x {height}",
            next_step="crop it",
        )  # fmt: skip
    rows, columns = round(height / side), round(width / side)  # halves become even
    if counted * rows * columns * side * side > longest:
        shrink = math.sqrt(frames * height * width / longest)
        rows, columns = (max(1, math.floor(one / shrink / side)) for one in (height, width))
    elif counted * rows * columns * side * side < shortest:
        grow = math.sqrt(shortest / (frames * height * width))
        rows, columns = (math.ceil(one * grow / side) for one in (height, width))
    return rows * side, columns * side


def limited(info: VisionInfo, rows: int) -> VisionInfo:
    """The tower for pictures of at most `rows` rows, and of no more than the checkpoint's processor makes."""
    of, counted = info.settings, info.settings["counted"]
    side = of["patch"] * of["merge"]
    longest = max(of["shortest"], min(of["most_pixels"], counted * rows * side * side))
    found = most_rows(side, of["shortest"] / counted, longest / counted)
    if info.video is not None:
        found = max(found, most_rows(side, math.ceil(info.video.settings["shortest"] / of["frames"]), side * side))
    return info.model_copy(update={"settings": {**of, "longest": longest}, "rows": found})


def most_rows(side: int, shortest: float, longest: float) -> int:
    """An upper bound of the rows of a picture, for any sides that `smart_resize` takes.

    One that shrinks has `longest` pixels, or one row of blocks; one that grows has sides that add up to at most
    sqrt(shortest) * (sqrt(ratio) + 1 / sqrt(ratio)), each of which is rounded up.
    """
    ratio = math.sqrt(MOST_RATIO)
    grown = shortest + side * math.sqrt(shortest) * (ratio + 1 / ratio) + side * side
    return max(1, math.ceil(max(longest, side * math.sqrt(longest) * ratio, grown) / (side * side)))
