"""Pictures that become one square, whatever their aspect: Gemma 3's, as transformers' `pil` processor makes them."""

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
    """The one tile of an RGB image."""
    of = info.settings
    return Picture(info, (np.asarray(resized(image, of["side"], of["side"], of["resample"])),), (info.name, info.rows))


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [side, side, 3] -> patches f32[rows, merged * numbers], and their places i32[rows, merged]."""
    side = tile.shape[0] // info.settings["patch"]
    return squares(tile, info), square_places(
        np.arange(side * side, dtype=np.int32).reshape(side, side), info.settings["merge"]
    )
