"""Files of videos: which frames are decoded of them, and hostile ones, which are refused in one line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.errors import UsageError
from mlcpipe.vision.processors import decode_video
from mlcpipe.vision.processors.decode_video import open_video

av = pytest.importorskip("av", reason="files are decoded by PyAV, of the extra sound")
pytest.importorskip("torch", reason="the support module has torch")

from tests.models import sight_videos

SHOWN = sight_videos.frames(20, 32, 48)
FILE = sight_videos.file_of(SHOWN)


def read(source: Any, wanted: Sequence[int] = (0, 7, 19), where: str = "the video") -> list[Any]:
    return [*open_video(source, where, lambda count, fps: wanted).images]


@pytest.mark.parametrize(
    ("form", "codec"),
    [
        ("mp4", "mpeg4"), ("mp4", "libx264"), ("webm", "libvpx"), ("matroska", "libvpx-vp9"), ("avi", "mpeg4"),
        ("mpegts", "mpeg2video"),
    ],
)  # fmt: skip
def test_frames_are_those_that_are_asked_for(form: str, codec: str, tmp_path: Path) -> None:
    """Those of another program, whatever the order of the file is in which they are stored."""
    data = sight_videos.file_of(SHOWN, 25, form=form, codec=codec)
    (tmp_path / "video").write_bytes(data)
    whole, asked = sight_videos.decoded(data), list[tuple[int, float]]()
    for source in (data, tmp_path / "video"):
        found = open_video(source, "the video", lambda count, fps: asked.append((count, fps)) or [0, 7, 7, 19])
        np.testing.assert_array_equal([*found.images], whole[[0, 7, 7, 19]])
        assert found.times_s == [at / 25 for at in (0, 7, 7, 19)] and found.duration_s == 20 / 25
    assert asked == [(20, 25.0)] * 2


def test_a_frame_stands_as_its_file_says() -> None:
    """As phones store videos that were taken upright."""
    data = bytearray(FILE)
    header = data.index(b"tkhd") + 4
    matrix = header + 4 + 5 * 4 + 8 + 4 * 2
    one = 1 << 16
    for at, number in enumerate((0, one, 0, -one, 0, 0)):  # a quarter with the clock
        data[matrix + 4 * at : matrix + 4 * at + 4] = number.to_bytes(4, "big", signed=True)
    (frame,) = read(bytes(data), [3])
    np.testing.assert_array_equal(frame, np.rot90(sight_videos.decoded(FILE)[3], -1))


def test_a_file_that_is_cut_has_the_frames_that_are_left() -> None:
    data = sight_videos.file_of(SHOWN, form="mpegts", codec="mpeg2video")
    cut, counts = data[: len(data) // 2], list[int]()
    found = open_video(cut, "the video", lambda count, fps: counts.append(count) or [count - 1])
    assert len([*found.images]) == 1 and 5 < counts[0] < 20


def test_what_is_not_decoded_is_the_frame_before() -> None:
    frames = read(FILE, [18, 19, 25, 30])
    np.testing.assert_array_equal(frames[2], frames[1])
    np.testing.assert_array_equal(frames[3], frames[1])


def playlist(name: str) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{name}\n".encode()


def sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"no video at all" * 100, "cannot be read"),
        (FILE[:200], "cannot be read|frames with times"),
        (playlist("/etc/passwd"), "cannot be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "cannot be read"),
        (sound(), "has no pictures"),
        (sight_videos.file_of(SHOWN, form="matroska", codec="ffv1"), "the codec of the video|cannot be read"),
        (3, "found int"),
        ("/no/such/file.mp4", "expected a path of a file"),
    ],
    ids=["empty", "text", "cut", "playlist", "concat", "sound", "codec", "number", "missing"],  # a codec's bytes differ
)
def test_other_things_are_refused_in_one_line(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read(data)
    assert "\n" not in str(caught.value)


def test_sizes_and_lengths_are_bounded_before_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise AssertionError("a frame is decoded")

    with monkeypatch.context() as patch:
        patch.setattr(decode_video, "frames_of", none)
        for name, value, words in (
            ("MAX_BYTES", 1 << 10, "at most 0 MiB"),
            ("MAX_PIXELS", 1000, "cannot be read|frames of the video; expected sides"),
            ("MAX_SIDE", 40, "frames of the video; expected sides up to 40"),
            ("MAX_FRAMES", 19, "too long; expected at most 19 frames"),
            ("MAX_DECODED_PIXELS", 20 * 32 * 48 - 1, "too long for its size"),
        ):
            with patch.context() as one:
                one.setattr(decode_video, name, value)
                with pytest.raises(UsageError, match=words):
                    read(FILE)
    assert len(read(FILE)) == 3


def test_damaged_files_end_in_frames_or_words() -> None:
    rng, outcomes = np.random.default_rng(0), set()
    for _ in range(60):
        data = bytearray(FILE)
        for place in rng.integers(0, len(data), 8):
            data[place] = rng.integers(256)
        try:
            outcomes.add(len(read(bytes(data))) == 3)
        except UsageError as error:
            outcomes.add("\n" not in str(error))
    assert outcomes == {True}


def test_without_pyav_the_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match=r"videos need PyAV; install the extra: pip install .mlcpipe\[sound,vision\]"):
        read(FILE)
