"""FFmpeg's decoders through PyAV, for files of strangers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlcpipe.errors import UsageError

_PROBED_BYTES = 1 << 20
_MOST_BROKEN = 16  # packets more than there are good frames


def require_pyav(what: str, extras: str) -> Any:
    """PyAV. Raises UsageError where it is missing, with the extras that have what `what` need."""
    try:
        import av
    except ImportError:
        raise UsageError(f"{what} need PyAV", next_step=f'install the extra: pip install "mlcpipe[{extras}]"') from None
    av.logging.set_level(None)
    return av


def options(formats: tuple[str, ...]) -> dict[str, str]:
    """Options to open a file by FFmpeg's demuxers of these names alone."""
    return {"format_whitelist": ",".join(formats), "probesize": str(_PROBED_BYTES)}


def frames_of(av: Any, container: Any, stream: Any) -> Iterator[Any]:
    """The frames of a stream; broken packets among good ones are left out, as players do."""
    good = bad = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            bad += 1
            if bad > good + _MOST_BROKEN:
                raise
            continue
        good += len(frames)
        yield from frames
