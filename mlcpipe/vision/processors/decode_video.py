"""A stranger's file to the frames that are wanted of it: FFmpeg's decoders through PyAV, bounded before they run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mlcpipe.errors import UsageError, last_line
from mlcpipe.support.pyav import frames_of, options, require_pyav
from mlcpipe.vision.processors.decode import MAX_PIXELS, MAX_SIDE, bytes_of
from mlcpipe.vision.processors.frames import Frames, Pixels

# Names of FFmpeg's demuxers: none of those that open other files or addresses, such as hls and concat.
FORMATS = ("avi", "matroska", "mov", "mpeg", "mpegts", "ogg", "webm")
# Names of its decoders, which are also all that may run while a file is opened.
CODECS = ("av1", "h264", "hevc", "libdav1d", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4", "theora", "vp8", "vp9")
MAX_BYTES = 256 << 20
MAX_FRAMES = 1 << 17  # of a file: 72 minutes of 30 a second
MAX_DECODED_PIXELS = 8 << 30  # up to the last frame that is wanted: 5 minutes of 1280 x 720, 30 a second
_MOST_PADDING = 128  # pixels of a side that a decoder computes beyond those of the frame
_LEAST_MOST = 1 << 20  # pixels that small frames' decoders allocate, too
_USUAL_FPS = 24.0  # of files that do not say it, as in transformers
Choose = Callable[[int, float], Sequence[int]]


def open_video(source: Any, where: str, choose: Choose) -> Frames:
    """Frames of a path or the bytes of a file: those that choose(count of all, frames a second) gives, in order.

    They are decoded when they are asked for. Raises UsageError for everything that is no such video, for one that is
    too large or too long, and where PyAV is missing.
    """
    av = require_pyav("videos", "sound,vision")
    data = bytes_of(source, where, MAX_BYTES, "a path, the bytes of a file, or a list of frames")
    with _opened(av, data, where) as (container, stream):
        fps, pixels = float(stream.average_rate or stream.guessed_rate or _USUAL_FPS), stream.width * stream.height
        count = _counted(container, stream, where)
    if not (count and 0 < fps <= MAX_FRAMES):
        raise UsageError(where, expected="frames with times", found=f"{count} frames, {fps:g} a second")
    wanted = choose(count, fps)
    if (wanted[-1] + 1) * pixels > MAX_DECODED_PIXELS:
        raise UsageError(
            f"{where} is too long for its size", expected=f"at most {MAX_DECODED_PIXELS >> 30} Gi pixels of all frames",
            found=f"{wanted[-1] + 1} frames of {pixels} pixels", next_step="cut it, or make it smaller",
        )  # fmt: skip
    return Frames(_chosen(av, data, where, wanted, pixels), [at / fps for at in wanted], count / fps)


@contextmanager
def _opened(av: Any, data: bytes, where: str) -> Iterator[tuple[Any, Any]]:
    """The container and its first stream of pictures. Raises UsageError."""
    bounds = {"codec_whitelist": ",".join(CODECS), "max_pixels": str(MAX_PIXELS)}
    try:
        with av.open(io.BytesIO(data), options={**options(FORMATS), **bounds}, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise UsageError(f"{where} has no pictures", expected="a video", found="other streams")
            stream = container.streams.video[0]
            if stream.codec_context is None or stream.codec_context.codec.name not in CODECS:
                found = getattr(stream.codec_context, "name", "another one")
                raise UsageError(f"the codec of {where}", expected=", ".join(CODECS), found=str(found)[:40])
            _check_size(stream.width, stream.height, where)
            most = max(_LEAST_MOST, (stream.width + _MOST_PADDING) * (stream.height + _MOST_PADDING))
            stream.codec_context.options = {"max_pixels": str(most)}  # of frames that are not shown, too
            stream.thread_type = "NONE"
            yield container, stream
    except UsageError:
        raise
    except Exception as error:  # whatever decoders raise for damaged files, also a MemoryError of their own
        if isinstance(error, MemoryError) and not isinstance(error, av.error.FFmpegError):
            raise
        raise UsageError(
            f"{where} cannot be read", expected=", ".join(FORMATS), found=last_line(error)[:200]
        ) from error


def _check_size(width: int, height: int, where: str) -> None:
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
        raise UsageError(
            f"frames of {where}", expected=f"sides up to {MAX_SIDE} and {MAX_PIXELS >> 20} million pixels",
            found=f"{width} x {height}", next_step="make them smaller",
        )  # fmt: skip


def _counted(container: Any, stream: Any, where: str) -> int:
    """The frames of a stream, none of which is decoded: whatever its header says."""
    count, hidden = 0, stream.codec_context.name == "vp8"
    for packet in container.demux(stream):
        if packet.size and not (hidden and not bytes(packet)[0] >> 4 & 1):  # a frame of VP8 that is not shown
            count += 1
            if count > MAX_FRAMES:
                raise UsageError(
                    f"{where} is too long", expected=f"at most {MAX_FRAMES} frames", found="more", next_step="cut it"
                )
    return count


def _chosen(av: Any, data: bytes, where: str, wanted: Sequence[int], pixels: int) -> Iterator[Pixels]:
    """The wanted frames, uint8 [height, width, 3]; the last one that can be decoded stands for those after it."""
    left, at, last = list(reversed(wanted)), 0, None
    with _opened(av, data, where) as (container, stream):
        for last in frames_of(av, container, stream):
            _check_size(last.width, last.height, where)
            if last.width * last.height > pixels:
                raise UsageError(f"frames of {where}", expected="one size", found=f"{last.width} x {last.height}")
            while left and left[-1] == at:
                left.pop()
                yield _upright(last)
            if not left:
                return
            at += 1
        if last is None:
            raise UsageError(f"{where} has no frames", expected="a video", found="none that can be decoded")
        for _ in left:
            yield _upright(last)


def _upright(frame: Any) -> Pixels:
    """In RGB, turned as its file says; FFmpeg counts degrees against the clock."""
    made: Pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
    return made
