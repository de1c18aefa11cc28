"""Gemma 4's pictures: of their own aspect, with about as many patches as they may have, in whole squares.

The numbers are those of transformers' `image_processing_pil_gemma4.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors.picture import Floats, Ints, Picture
from mlcpipe.vision.processors.pixels import grid_places, resized, squares

if TYPE_CHECKING:
    from PIL import Image


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The one tile of an RGB image, in whole squares."""
    rows, columns = squares_of(image.height, image.width, info)
    square = info.settings["patch"] * info.settings["merge"]
    tile = np.asarray(resized(image, rows * square, columns * square, info.settings["resample"]))
    return Picture(info, (tile,), ("<|image>", rows * columns, "<image|>"), (rows * columns,))


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [height, width, 3] -> patches f32[t, merged * numbers], and their places i32[t, merged]."""
    return squares(tile, info, channels_last=True), grid_places(tile, info)


def squares_of(height: int, width: int, info: VisionInfo) -> tuple[int, int]:
    """(rows, columns) of squares: the most of the picture's aspect, at least one of each."""
    of = info.settings
    square, most = of["patch"] * of["merge"], of["most"]
    factor = math.sqrt(most * of["merge"] ** 2 * of["patch"] ** 2 / (height * width))
    rows, columns = math.floor(factor * height / square), math.floor(factor * width / square)
    if rows == 0:
        return 1, min(width // height, most)
    if columns == 0:
        return min(height // width, most), 1
    return rows, columns
