"""Videos: frames with times, of which a processor makes texts and pictures that follow each other in a prompt."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mlcpipe.bundle.model_info import VideoInfo, VisionInfo
from mlcpipe.errors import UsageError
from mlcpipe.vision.processors.decode import open_image
from mlcpipe.vision.processors.frames import Frames, Pixels
from mlcpipe.vision.processors.picture import Picture

_MAX_S = 1e6


@dataclass(frozen=True)
class Video:
    """What a video is read from: a path, the bytes of a file, or a sequence of frames, of which `times_s` are the
    seconds of each.
    """

    given: Any
    times_s: Any = None


def parts_of(video: Video, where: str, info: VisionInfo) -> Iterator[str | Picture]:
    """Texts and pictures, as they follow each other in a prompt; frames are decoded meanwhile.

    Raises UsageError for a model that sees no videos, and for what is none.
    """
    of = info.video
    if of is None:
        raise UsageError(
            "the model sees no videos", where=where, expected="pictures or text", found="a video",
            next_step="show frames of it as pictures, or take a model of docs/models.md that sees videos",
        )  # fmt: skip
    processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
    given = video.given
    if isinstance(given, (list, tuple)) or (isinstance(given, np.ndarray) and given.ndim == 4):
        frames = _listed(given, video.times_s, where, of)
    elif video.times_s is not None:
        raise UsageError(f"{where}.times_s", expected="a list of frames", found="a file, which has its own times")
    else:
        from mlcpipe.vision.processors.decode_video import open_video

        frames = open_video(given, where, lambda count, fps: processor.sampled(of, count, fps))
    made: Iterator[str | Picture] = processor.video(replace(frames, images=_equal(frames.images, where)), info)
    return made


def _listed(given: Any, times_s: Any, where: str, of: VideoInfo) -> Frames:
    """Frames that a caller has chosen, by default as many a second as of files."""
    most = of.settings["most_frames"]
    if not 0 < len(given) <= most:
        raise UsageError(where, expected=f"1 to {most} frames", found=len(given), next_step="leave some out")
    times = [at / of.fps for at in range(len(given))] if times_s is None else _times(times_s, len(given), where)
    names = [f"{where}[{at}]" for at in range(len(given))]
    images = (np.asarray(open_image(_path(frame), name)) for name, frame in zip(names, given))
    return Frames(images, times, times[-1])


def _path(frame: Any) -> Any:
    return Path(frame) if isinstance(frame, str) else frame


def _times(times_s: Any, count: int, where: str) -> list[float]:
    """Checked seconds, one of each frame, which never fall. Raises UsageError."""
    found = times_s.tolist() if isinstance(times_s, np.ndarray) and times_s.size <= count else times_s
    good = isinstance(found, (list, tuple)) and len(found) == count
    good = good and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in found)
    if not good or not all(0 <= one <= _MAX_S for one in found) or list(found) != sorted(found):
        expected = f"{count} rising numbers of seconds from 0 to {_MAX_S:.0f}, one of each frame"
        raise UsageError(f"{where}.times_s", expected=expected, found=repr(times_s)[:60])
    return [float(one) for one in found]


def _equal(images: Iterator[Pixels], where: str) -> Iterator[Pixels]:
    """The frames, checked to have one size. Raises UsageError."""
    first = next(images)
    for image in chain((first,), images):
        if image.shape != first.shape:
            sizes = [f"{one.shape[1]} x {one.shape[0]}" for one in (first, image)]
            raise UsageError(f"frames of {where}", expected=f"one size, {sizes[0]}", found=sizes[1])
        yield image
