"""Qwen3-VL's pictures, which are Qwen2-VL's, and its videos: each pair of frames is a picture after its time.

The numbers are those of transformers' `video_processing_qwen3_vl.py`, whose resizing is torch's of bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mlcpipe.bundle.model_info import VideoInfo, VisionInfo
from mlcpipe.vision.processors.frames import Frames, Pixels
from mlcpipe.vision.processors.picture import Picture
from mlcpipe.vision.processors.qwen2_vl import limited, patches, picture_of_tile, prepare, smart_resize
from mlcpipe.vision.processors.torch_resize import resized

__all__ = ["limited", "patches", "prepare", "sampled", "video", "video_size"]
_CAPPED_GROWTH = 1.05  # of the fewest pixels, below which no frame of a capped video falls


def sampled(of: VideoInfo, count: int, fps: float) -> Sequence[int]:
    """Which of `count` frames, of which `fps` are in a second, are taken of a file."""
    wanted = int(count / fps * of.fps)
    wanted = min(max(wanted, of.settings["least_frames"]), of.settings["most_frames"], count)
    taken: list[int] = np.linspace(0, count - 1, wanted).round().astype(int).tolist()
    return taken


def video(frames: Frames, info: VisionInfo) -> Iterator[str | Picture]:
    """A time, then a picture of the frames of one patch, and so on; the last frame is there again where one is missing.

    Raises UsageError for sides that differ more than 200 times.
    """
    assert info.video is not None
    together, times, size = info.settings["frames"], frames.times_s, None
    held: list[Pixels] = []
    for at, frame in enumerate(frames.images):
        size = size or video_size(len(times), frame.shape[0], frame.shape[1], info)
        held.append(resized(frame, *size, info.video.settings["resample"]))
        if len(held) == together or at == len(times) - 1:
            first = at + 1 - len(held)
            held += held[-1:] * (together - len(held))
            yield f"<{(times[first] + times[at]) / 2:.1f} seconds>"
            yield picture_of_tile(np.stack(held), info)
            held = []


def video_size(count: int, height: int, width: int, info: VisionInfo) -> tuple[int, int]:
    """(height, width) of `count` frames: their pixels are bounded together, and those of a patch as a picture's are."""
    assert info.video is not None
    of, side, together = info.video.settings, info.settings["patch"] * info.settings["merge"], info.settings["frames"]
    count, longest = max(count, together), of["longest"]
    if of["capped_rows"]:
        most = min(of["capped_rows"] * side * side, longest // count)
        longest = count * max(most, int(of["shortest"] * _CAPPED_GROWTH))
    if height < side or width < side:
        grow = max(side / height, side / width)
        height, width = int(height * grow), int(width * grow)
    counted = round(count / together) * together
    found = smart_resize(height, width, side, of["shortest"], longest, count, counted)
    if found[0] * found[1] > info.rows * side * side:
        found = smart_resize(height, width, side, 1, info.settings["longest"])
    return found
