"""Idefics3's and SmolVLM's pictures: tiles row by row, and the whole picture in one tile more; videos frame by frame.

The numbers are those of transformers' `image_processing_pil_idefics3.py`, whose resizing is Pillow's, and of
`video_processing_smolvlm.py`, whose resizing is torch's of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VideoInfo, VisionInfo
from mlcpipe.vision.processors.frames import Frames
from mlcpipe.vision.processors.picture import Floats, Ints, Picture
from mlcpipe.vision.processors.pixels import resized, square_places, squares
from mlcpipe.vision.processors.torch_resize import resized as frame_resized

if TYPE_CHECKING:
    from PIL import Image

_SKIPPED_S = 1  # at both ends of a long video
_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MOST_WORDS = 999  # a number of frames that is written in words


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The tiles of an RGB image."""
    of = info.settings
    tile, resample = of["tile"], of["resample"]
    if of["do_resize"]:
        image = resized(image, *_longest_side(image.height, image.width, of["longest"]), resample)
    rows = columns = 0
    if of["do_image_splitting"]:
        image = resized(image, *_whole_tiles(image.height, image.width, tile), resample)
        if image.height > tile or image.width > tile:
            rows, columns = image.height // tile, image.width // tile
    pixels = np.asarray(image)
    tiles = [pixels[r * tile : (r + 1) * tile, c * tile : (c + 1) * tile] for r in range(rows) for c in range(columns)]
    if rows or not of["do_image_splitting"]:
        image = resized(image, tile, tile, resample)
    return Picture(info, (*tiles, np.asarray(image)), _layout(rows, columns, info.rows))


def patches(tile: NDArray[np.uint8], info: VisionInfo) -> tuple[Floats, Ints]:
    """A tile uint8 [size, size, 3] -> patches f32[rows, merged * numbers], and their places i32[rows, merged].

    Patches of a row of the result lie in a square, row by row; a patch is [3, pixel row, pixel column]. A tile of a
    video is [1, size, size, 3].
    """
    side = tile.shape[-2] // info.settings["patch"]
    return squares(tile, info), square_places(_places(side).reshape(side, side), info.settings["merge"])


def sampled(of: VideoInfo, count: int, fps: float) -> Sequence[int]:
    """Which of `count` frames, of which `fps` are in a second, are taken of a file."""
    duration_s, most = count / fps, of.settings["most_frames"]
    wanted, first, last = max(1, min(round(of.fps * duration_s), most)), 0, count - 1
    if duration_s - 2 * _SKIPPED_S > most * of.fps:
        first, last = int(_SKIPPED_S * fps), min(int(count - _SKIPPED_S * fps), last)
    if first >= last:
        first, last = 0, count - 1
    taken: list[int] = np.unique(np.linspace(first, last, wanted, dtype=int)).tolist()
    return taken


def video(frames: Frames, info: VisionInfo) -> Iterator[str | Picture]:
    """How many frames there are, and each of them as one tile after its time."""
    assert info.video is not None
    of, tile, times = info.video.settings, info.settings["tile"], frames.times_s
    length = timedelta(seconds=int(frames.duration_s))
    yield f"You are provided the following series of {_words(len(times))} frames from a {length} [H:MM:SS] video.\n"
    for time_s, frame in zip(times, frames.images):
        size = _longest_side(frame.shape[0], frame.shape[1], of["longest"])
        frame = frame_resized(frame_resized(frame, *size, of["resample"]), tile, tile, of["resample"])
        yield f"\nFrame from {int(time_s // 60):02d}:{int(time_s % 60):02d}:"
        yield Picture(info, (frame[None],), _layout(0, 0, info.rows))
    yield "\n\n"


def _words(number: int) -> str:
    """A number up to MOST_WORDS in English."""
    if number < len(_ONES):
        return _ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_ONES[one]}" if one else "")
    hundred, rest = divmod(number, 100)
    return f"{_ONES[hundred]} hundred" + (f" and {_words(rest)}" if rest else "")


def _places(side: int) -> Ints:
    """Rows of the table for the patches of a tile, i32[side * side]: fractions of its side, looked up among its own."""
    step = np.float32(1) / np.float32(side)
    fractions = np.minimum(np.arange(side, dtype=np.float32) * step, np.float32(1.0 - 1e-6))
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    found = np.searchsorted(bounds, fractions, side="right").astype(np.int32)
    places: Ints = (found[:, None] * side + found).reshape(-1)
    return places


def _layout(rows: int, columns: int, count: int) -> tuple[str | int, ...]:
    """Texts, and numbers of rows of the tower's, as they follow each other in a prompt."""
    parts: list[str | int] = []
    begin = ""
    for r in range(rows):
        for c in range(columns):
            parts += [f"{begin}<fake_token_around_image><row_{r + 1}_col_{c + 1}>", count]
            begin = ""
        begin = "\n"
    begin += "\n" if rows else ""
    return (*parts, f"{begin}<fake_token_around_image><global-img>", count, "<fake_token_around_image>")


def _longest_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """(height, width) with a longest side of so many pixels, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """(height, width) in whole tiles, at least so large."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile
