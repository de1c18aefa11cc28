"""Files of sound: what is read from them, and hostile ones, which are refused in one line."""

from __future__ import annotations

import io
import struct
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.errors import UsageError
from mlcpipe.sound.decode import read_sound

av = pytest.importorskip("av", reason="files are decoded by PyAV, of the extra sound")


def wav(samples: Any, rate: int = 16_000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def encoded(samples: Any, form: str, codec: str, rate: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as out:
        stream = out.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.asarray(samples, np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        for part in av.AudioResampler(stream.format, "mono", rate, frame_size=stream.frame_size or None).resample(
            frame
        ):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()


TONE = (8000 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)).astype(np.int16)


def test_samples_of_a_file_are_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "tone.wav").write_bytes(wav(TONE))
    for source in (tmp_path / "tone.wav", str(tmp_path / "tone.wav"), wav(TONE), bytearray(wav(TONE))):
        np.testing.assert_array_equal(read_sound(source), TONE.astype(np.float32) / 32768)
    given = np.ones(5, np.float32)
    assert read_sound(given) is given


def test_channels_are_mixed_and_rates_changed() -> None:
    t = np.arange(44_100) / 44_100
    stereo = np.stack([8000 * np.sin(2 * np.pi * 440 * t), np.zeros(44_100)], 1).reshape(-1)
    found = read_sound(wav(stereo, 44_100, 2))
    assert abs(len(found) - 16_000) < 20
    spectrum = np.abs(np.fft.rfft(found[:16_000], 16_000))
    assert int(spectrum.argmax()) == 440
    assert np.abs(found).max() == pytest.approx(4000 / 32768, rel=0.02)


@pytest.mark.parametrize(("form", "codec"), [("flac", "flac"), ("ogg", "libopus"), ("mp3", "mp3"), ("mp4", "aac")])
def test_formats(form: str, codec: str) -> None:
    found = read_sound(encoded(TONE, form, codec, 48_000 if codec == "libopus" else 16_000))
    seconds = len(TONE) / (48_000 if codec == "libopus" else 16_000)
    assert len(found) / 16_000 == pytest.approx(seconds, abs=0.15)
    assert np.abs(found).max() > 0.1


def playlist(name: str) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{name}\n".encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"no sound at all" * 100, "cannot be read"),
        (wav(TONE)[:40], "cannot be read|is empty"),
        (wav([]), "cannot be read|is empty"),
        (playlist("/etc/passwd"), "cannot be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "cannot be read"),
        (b"lmgg" + bytes(100), "is a model of GGML"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "is a model of GGML"),
        (3, "found int"),
        ("/no/such/file.wav", "expected a path of a file"),
        (np.zeros((2, 3), np.float32), "an array float32"),
        (np.zeros(3, np.float64), "an array float32"),
        (np.array([np.nan], np.float32), "finite numbers"),
    ],
)
def test_other_things_are_refused_in_one_line(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_sound(data)
    assert "\n" not in str(caught.value)


def test_sizes_and_lengths_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="too long; expected at most 1 s"):
        read_sound(wav(np.zeros(16_000 * 3)), max_s=1)
    with pytest.raises(UsageError, match="at most 1 MiB"):
        read_sound(bytes(3 << 20), max_bytes=1 << 20)
    (tmp_path / "large.wav").write_bytes(bytes(3 << 20))
    with pytest.raises(UsageError, match="too large"):
        read_sound(tmp_path / "large.wav", max_bytes=1 << 20)


@pytest.mark.parametrize("rate", [1, 999, 2_000_000_000])
def test_rates_that_no_sound_has_are_refused(rate: int) -> None:
    """A second of 1 Hz would become 16,000 samples."""
    with pytest.raises(UsageError, match=rf"the rate of the sound; expected 1000 to 768000 .*; found {rate}$"):
        read_sound(wav(TONE, rate))


def test_a_header_that_promises_more_than_there_is_takes_no_memory() -> None:
    data = bytearray(wav(TONE))
    data[40:44] = struct.pack("<I", 0xFFFFFFF0)
    assert 0 < len(read_sound(bytes(data))) <= len(TONE)


def test_damaged_files_end_in_samples_or_words() -> None:
    whole = encoded(TONE, "flac", "flac", 16_000)
    rng = np.random.default_rng(0)
    outcomes = set()
    for _ in range(60):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 8):
            data[place] = rng.integers(256)
        try:
            outcomes.add(0 < len(read_sound(bytes(data))) <= 2 * len(TONE))
        except UsageError as error:
            outcomes.add("\n" not in str(error))
    assert outcomes == {True}


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match=r'pip install "mlcpipe\[sound\]"'):
        read_sound(wav(TONE))
