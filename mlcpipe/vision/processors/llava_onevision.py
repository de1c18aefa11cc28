"""LLaVA-OneVision's pictures: the whole one in a square, then tiles of the grid that wastes least, without its padding.

Where a message shows several, each is one square. The numbers are those of transformers'
`image_processing_pil_llava_onevision.py`, and of `pack_image_features` in its model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors.picture import Floats, Ints, Picture
from mlcpipe.vision.processors.pixels import resized, squares

if TYPE_CHECKING:
    from PIL import Image

Pixels = NDArray[np.uint8]
KEPT_RATIO = 1.1  # of the rows' square root to that of the most tiles: above it rows are resampled
MOST_TILES = 64  # of a side
_GRID = "grid_"


def grid_settings(grids: Sequence[tuple[int, int]]) -> dict[str, int]:
    """(rows, columns) of tiles as settings, in their order."""
    return {f"{_GRID}{i:03}": rows * MOST_TILES + columns for i, (rows, columns) in enumerate(grids)}


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """An RGB image, the only one of its prompt: the whole, and the canvas that its tiles are cut from."""
    of = info.settings
    size, across = of["side"], of["side"] // of["patch"]
    rows, columns = _grid_of(image.height, image.width, of)
    whole = np.asarray(resized(image, size, size, of["resample"]))
    held = _unpadded(image.height, image.width, rows * across, columns * across)
    high, wide = _resampled(held, info)
    if not high:  # of the flattest nothing is left; of the thinnest the ends of lines are
        return Picture(info, (whole,), (info.rows,), (info.rows,))
    canvas, count = _canvas(image, rows * size, columns * size, of["resample"]), high * (wide + 1)
    return Picture(info, (whole, canvas), (info.rows + count,), (info.rows, count), held=held)


def prepare_among(image: Image.Image, info: VisionInfo) -> Picture:
    """An RGB image, one of several of its prompt: in the middle of a square of the mean, and a row that ends it."""
    from PIL import Image as images

    of, side, count = info.settings, max(image.size), info.rows + 1
    square = images.new("RGB", (side, side), tuple(int(one * 255) for one in info.mean))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    tile = np.asarray(resized(square, of["side"], of["side"], of["resample"]))
    return Picture(info, (tile,), (count,), (count,))


def patches(tile: Pixels, info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [side, side, 3] -> patches f32[rows + 1, numbers], and their places i32[rows + 1, 1].

    The last one is of no picture: nothing sees it.
    """
    found = np.pad(squares(tile, info), ((0, 1), (0, 0)))
    return found, np.arange(len(found), dtype=np.int32)[:, None] % (len(found) - 1)


def packed(picture: Picture, tile: int, encoded: Callable[[Pixels], Floats]) -> Floats:
    """The rows f32[n, width] of a tile, where `encoded` gives those of squares, whose last one ends lines."""
    if tile == 0:
        return encoded(picture.tiles[0])[: picture.counts[0]]
    info, canvas = picture.info, picture.tiles[tile]
    size, across = info.settings["side"], info.settings["side"] // info.settings["patch"]
    sides = [length // size * across for length in canvas.shape[:2]]
    shape = _resampled(picture.held, info)
    taps = [_taps(held, count, (of - held) // 2) for held, count, of in zip(picture.held, shape, sides)]
    made = np.zeros((shape[0], shape[1] + 1, info.width), np.float32)
    for row in range(canvas.shape[0] // size):
        for column in range(canvas.shape[1] // size):
            part = canvas[row * size : (row + 1) * size, column * size : (column + 1) * size]
            found = encoded(part)
            made[:, -1] = found[-1]
            square = found[:-1].reshape(across, across, -1)
            for down, at_row in taps[0]:
                for right, at_column in taps[1]:
                    ys, xs = (np.flatnonzero(at // across == of) for at, of in ((at_row, row), (at_column, column)))
                    weights = (down[ys, None] * right[xs])[:, :, None]
                    made[np.ix_(ys, xs)] += weights * square[np.ix_(at_row[ys] % across, at_column[xs] % across)]
    return made.reshape(-1, info.width)


def _taps(held: int, count: int, begin: int) -> list[tuple[Floats, Ints]]:
    """What each of `count` rows has of `held` ones from `begin` on: weights f32[count] and places i32[count].

    As torch's interpolation of mode bilinear has it, without antialias; those of weight 0 are not asked for.
    """
    if not count:
        return []
    scale = np.float32(held) / np.float32(count)
    at = np.maximum((np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    low = np.minimum(at.astype(np.int32), held - 1)
    part = (at - low).astype(np.float32)
    lower: tuple[Floats, Ints] = (np.float32(1) - part, low + np.int32(begin))
    upper: tuple[Floats, Ints] = (part, np.minimum(low + 1, held - 1) + np.int32(begin))
    return [lower, upper] if part.any() else [lower]


def _grid_of(height: int, width: int, of: Mapping[str, int]) -> tuple[int, int]:
    """(rows, columns) of tiles that keep most of the picture's pixels, and of those the one that pads least."""
    best, most, least = (1, 1), 0, math.inf
    for code in (of[name] for name in sorted(of) if name.startswith(_GRID)):
        grid = divmod(code, MOST_TILES)
        high, wide = grid[0] * of["side"], grid[1] * of["side"]
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = high * wide - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = grid, kept, wasted
    return best


def _canvas(image: Image.Image, high: int, wide: int, resample: int) -> Pixels:
    """The picture of its own aspect, in the middle of zeros: uint8 [high, wide, 3]."""
    across, down = wide / image.width, high / image.height
    if across < down:
        height, width = min(math.ceil(image.height * across), high), wide
    else:
        height, width = high, min(math.ceil(image.width * down), wide)
    made = np.zeros((high, wide, 3), np.uint8)
    top, left = (high - height) // 2, (wide - width) // 2
    made[top : top + height, left : left + width] = np.asarray(resized(image, height, width, resample))
    return made


def _unpadded(height: int, width: int, high: int, wide: int) -> tuple[int, int]:
    """(rows, columns) of a canvas' patches that are left without equal borders of padding."""
    if width / height > wide / high:
        return high - (high - int(round(height * (wide / width), 7))) // 2 * 2, wide
    return high, wide - (wide - int(round(width * (high / height), 7))) // 2 * 2


def _resampled(held: tuple[int, ...], info: VisionInfo) -> tuple[int, int]:
    """(rows, columns) that these become, of which there may not be many more than the most tiles have."""
    rows, columns = held
    ratio = math.sqrt(rows * columns / (info.settings["most"] * info.rows))
    return (int(rows // ratio), int(columns // ratio)) if ratio > KEPT_RATIO else (rows, columns)
