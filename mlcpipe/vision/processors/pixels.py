"""Pictures as Pillow resizes them, and the patches of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors.picture import Floats, Ints, normalized

if TYPE_CHECKING:
    from PIL import Image


def resized(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    """The picture of this size, by one of Pillow's filters."""
    from PIL import Image as images

    return image.resize((width, height), images.Resampling(resample))


def squares(tile: NDArray[np.uint8], info: VisionInfo, *, channels_last: bool = False, fused: bool = False) -> Floats:
    """A tile uint8 [height, width, 3] -> patches f32[rows, merged * numbers]; what fills no patch is cut off.

    Patches of a row lie in a square of `merge` by `merge`, row by row; a patch is [3, pixel row, pixel column], or with
    `channels_last` [pixel row, pixel column, 3]. `fused` is as in `normalized`. A tile [1, height, width, 3] is a frame
    of a video.
    """
    colours = info.video if tile.ndim == 4 and info.video is not None else info
    fused = fused or tile.ndim == 4
    patch, merge = info.settings["patch"], info.settings["merge"]
    high, wide = (size // (patch * merge) for size in tile.shape[-3:-1])
    pixels = normalized(
        tile[..., : high * merge * patch, : wide * merge * patch, :], colours.mean, colours.std, fused=fused
    )
    parts = pixels.reshape(high, merge, patch, wide, merge, patch, 3)
    parts = parts.transpose(*(0, 3, 1, 4, *((2, 5, 6) if channels_last else (6, 2, 5))))
    return np.ascontiguousarray(parts.reshape(high * wide, info.merged * info.numbers))


def square_places(places: Ints, merge: int) -> Ints:
    """Something of each patch i32[high, wide] -> in the order of `squares`, i32[rows, merge * merge]."""
    high, wide = (size // merge for size in places.shape)
    parts = places[: high * merge, : wide * merge].reshape(high, merge, wide, merge).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(parts.reshape(high * wide, merge * merge))


def grid_places(tile: NDArray[np.uint8], info: VisionInfo) -> Ints:
    """The row and the column of each patch of a tile, as `mlcpipe.vision.axial` reads them, i32[rows, merged]."""
    high, wide = (size // info.settings["patch"] for size in tile.shape[:2])
    rows, columns = np.arange(high, dtype=np.int32), np.arange(wide, dtype=np.int32)
    return square_places(rows[:, None] << 16 | columns, info.settings["merge"])
