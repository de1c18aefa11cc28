"""Qwen2.5-VL's pictures: those of Qwen2-VL, with patches window by window."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors import qwen2_vl
from mlcpipe.vision.processors.picture import Floats, Ints
from mlcpipe.vision.processors.qwen2_vl import MOST_RATIO, prepare

__all__ = ["limited", "patches", "prepare", "windows"]


def limited(info: VisionInfo, rows: int) -> VisionInfo:
    """As in `qwen2_vl`, with as many windows as there may be."""
    info, window = qwen2_vl.limited(info, rows), info.settings["window"]
    sides = math.isqrt(info.rows) * (math.sqrt(MOST_RATIO) + 1) + 2 * MOST_RATIO  # at most, of a picture's grid
    return info.model_copy(update={"windows": math.ceil(info.rows / window**2 + sides / window) + 1})


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """As in `qwen2_vl`, with the rows of each window after those of another one.

    A place has one number more: for row i of the result which of these rows is row i of the picture.
    """
    made, places = qwen2_vl.patches(tile, info.model_copy(update={"places": info.places - 1}))
    order = np.concatenate([*_windows(tile, info)])
    back = np.argsort(order).astype(np.int32)
    of_patches = places[order].reshape(len(order), info.merged, info.places - 1)
    last = np.broadcast_to(back[:, None, None], (len(order), info.merged, 1))
    return made[order], np.concatenate([of_patches, last], axis=2).reshape(len(order), info.merged * info.places)


def windows(tile: NDArray[np.uint8], info: VisionInfo) -> list[int]:
    """The number of patches of each window of a tile, in the order of `patches`."""
    return [len(window) * info.merged for window in _windows(tile, info)]


def _windows(tile: NDArray[np.uint8], info: VisionInfo) -> Iterator[Ints]:
    """The rows of the picture that each window has."""
    of = info.settings
    rows, columns = (side // (of["patch"] * of["merge"]) for side in tile.shape[:2])
    number, side = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns), of["window"]
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            yield number[top : top + side, left : left + side].reshape(-1)
