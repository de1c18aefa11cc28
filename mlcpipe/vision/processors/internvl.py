"""InternVL's pictures: tiles of the closest aspect row by row, and the whole picture in one tile more.

The numbers are those of transformers' `image_processing_pil_got_ocr2.py`, as InternVL's processor calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors.picture import Floats, Ints, Picture
from mlcpipe.vision.processors.pixels import resized, square_places, squares

if TYPE_CHECKING:
    from PIL import Image


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The tiles of an RGB image."""
    of = info.settings
    tile, resample = of["tile"], of["resample"]
    columns, rows = (1, 1) if of["most"] == 1 else grid_of(image.height, image.width, tile, of["least"], of["most"])
    pixels = np.asarray(resized(image, rows * tile, columns * tile, resample))
    tiles = [pixels[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for r in range(rows) for c in range(columns)]
    if len(tiles) > 1:
        tiles.append(np.asarray(resized(image, tile, tile, resample)))
    return Picture(info, tuple(tiles), ("<img>", len(tiles) * info.rows, "</img>"))


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [size, size, 3] -> patches f32[rows + 1, merged * numbers], and their places i32[rows + 1, merged].

    The last row begins with the class token, of place 0; nothing sees the others of that row.
    """
    side = tile.shape[0] // info.settings["patch"]
    found = squares(tile, info)
    places = square_places(np.arange(1, side * side + 1, dtype=np.int32).reshape(side, side), info.settings["merge"])
    return np.pad(found, ((0, 1), (0, 0))), np.pad(places, ((0, 1), (0, 0)))


def grid_of(height: int, width: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """(columns, rows) of `least` to `most` tiles whose aspect is closest to the picture's; of equal ones the last that
    has less than twice its pixels.
    """
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    best, closest = (1, 1), float("inf")
    for grid in sorted(grids, key=lambda one: one[0] * one[1]):
        distance = abs(width / height - grid[0] / grid[1])
        if distance < closest:
            best, closest = grid, distance
        elif distance == closest and width * height > 0.5 * tile * tile * grid[0] * grid[1]:
            best = grid
    return best
