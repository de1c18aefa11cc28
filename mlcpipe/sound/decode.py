"""A stranger's file to samples: FFmpeg's decoders of common formats through PyAV, bounded while they run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlcpipe.errors import UsageError, last_line
from mlcpipe.sound.log_mel import RATE_HZ, Floats
from mlcpipe.support.files import read_bounded
from mlcpipe.support.pyav import frames_of, options, require_pyav

# Names of FFmpeg's demuxers: none of those that open other files or addresses, such as hls and concat.
FORMATS = ("aac", "aiff", "au", "caf", "flac", "matroska", "mov", "mp3", "mpeg", "mpegts", "ogg", "w64", "wav", "webm")
_WHAT = "the sound"
MAX_BYTES = 512 << 20
MAX_S = 6 * 3600
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 768_000  # of a file: one second of 1 Hz would become 16,000 samples
EXTRA = ("sound files", "sound")  # what needs PyAV, and the extra that has it
# A file that is refused by name: the weights of another program are no sound.
_GGML, _GGUF = (b"lmgg", b"ggml"), b"GGUF"


def read_sound(source: Any, *, max_bytes: int = MAX_BYTES, max_s: float = MAX_S) -> Floats:
    """Samples f32[n] at 16 kHz, of one channel, of a path, the bytes of a file, or such an array.

    At most `max_bytes` are read, and at most `max_s` seconds decoded. Raises UsageError for everything that is no such
    sound, and where PyAV is missing.
    """
    if isinstance(source, np.ndarray):
        return _checked(source, max_s)
    path = None
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.is_file():
            raise UsageError(_WHAT, expected="a path of a file", found=str(source)[:200])
        source = read_bounded(path, max_bytes, UsageError, _WHAT)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise UsageError(_WHAT, expected="a path, bytes or an array", found=type(source).__name__)
    if len(source) > max_bytes:
        raise UsageError(_WHAT, expected=f"at most {max_bytes >> 20} MiB", found=f"{len(source) >> 20} MiB")
    return _decoded(bytes(source), path, max_s)


def _checked(samples: Any, max_s: float) -> Floats:
    if samples.ndim != 1 or samples.dtype != np.float32 or len(samples) > max_s * RATE_HZ:
        raise UsageError(
            _WHAT, expected=f"an array float32 [n] at 16 kHz, of at most {max_s:.0f} s",
            found=f"{samples.dtype}{list(samples.shape)}",
        )  # fmt: skip
    if not np.isfinite(samples).all():
        raise UsageError(_WHAT, expected="finite numbers", found="NaN or infinity")
    checked: Floats = samples
    return checked


def _decoded(data: bytes, where: Path | None, max_s: float) -> Floats:
    av = require_pyav(*EXTRA)
    if data[:4] in (*_GGML, _GGUF):
        raise UsageError(
            f"{_WHAT} is a model of GGML", where=where, expected="a sound", found="whisper.cpp's weights or the like"
        )
    parts, count, most = [], 0, int(max_s * RATE_HZ)
    try:
        with av.open(io.BytesIO(data), options=options(FORMATS), metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise UsageError(
                    f"{_WHAT} has no sound", where=where, expected="a file with sound", found="other streams"
                )
            for part in _samples(av, container):
                parts.append(part)
                count += len(part)
                if count > most:
                    raise UsageError(
                        f"{_WHAT} is too long",
                        where=where,
                        expected=f"at most {max_s:.0f} s",
                        next_step="cut it into parts",
                    )
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # whatever decoders raise for damaged files
        raise UsageError(
            f"{_WHAT} cannot be read", where=where, expected=", ".join(FORMATS), found=last_line(error)[:200]
        ) from error
    if not count:
        raise UsageError(f"{_WHAT} is empty", where=where, expected="a file with sound", found="no samples")
    samples: Floats = np.concatenate(parts).astype(np.float32)
    samples /= np.float32(32768)
    return samples


def _samples(av: Any, container: Any) -> Iterator[Any]:
    """int16[n] of one channel at 16 kHz, as the published program has them from FFmpeg."""
    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE_HZ)
    stream = container.streams.audio[0]
    stream.thread_type = "NONE"
    for frame in frames_of(av, container, stream):
        if not MIN_RATE_HZ <= frame.sample_rate <= MAX_RATE_HZ:
            rates = f"{MIN_RATE_HZ} to {MAX_RATE_HZ} samples a second"
            raise UsageError(f"the rate of {_WHAT}", expected=rates, found=frame.sample_rate)
        frame.pts = None  # files with gaps in their times are decoded on
        for made in resampler.resample(frame):
            yield made.to_ndarray().reshape(-1)
    for made in resampler.resample(None):
        yield made.to_ndarray().reshape(-1)
