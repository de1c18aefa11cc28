"""Pixtral's pictures: of their own aspect, at most so long, in whole squares of patches; a text ends each row.

The numbers are those of transformers' `image_processing_pil_pixtral.py`.
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
    of = info.settings
    height, width, square = image.height, image.width, of["patch"] * of["merge"]
    ratio = max(height / of["longest"], width / of["longest"])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    rows, columns = (max(1, (size - 1) // square + 1) for size in (height, width))
    tile = np.asarray(resized(image, rows * square, columns * square, of["resample"]))
    layout = [part for _ in range(rows) for part in (columns, "[IMG_BREAK]")][:-1]
    return Picture(info, (tile,), (*layout, "[IMG_END]"), (rows * columns,))


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [height, width, 3] -> patches f32[t, merged * numbers], and their places i32[t, merged]."""
    return squares(tile, info), grid_places(tile, info)
