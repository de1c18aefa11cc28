"""Transcripts as text, JSON in OpenAI's form, SubRip and WebVTT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mlcpipe.runtime.speech.languages import NAMES
from mlcpipe.runtime.speech.transcriber import Segment, Transcript

_ROUNDED = ("start", "end")


def as_text(transcript: Transcript) -> str:
    """The text in one line."""
    return f"{transcript.text}\n"


def as_json(transcript: Transcript) -> str:
    """An object with the text."""
    return json.dumps({"text": transcript.text}, ensure_ascii=False) + "\n"


def as_verbose_json(transcript: Transcript) -> str:
    """An object with language, duration in seconds, and segments."""
    return json.dumps(verbose(transcript), ensure_ascii=False) + "\n"


def verbose(transcript: Transcript) -> dict[str, Any]:
    """OpenAI's `verbose_json`: times in seconds, rounded to milliseconds, and the language by its name."""
    segments = []
    for one in transcript.segments:
        fields = asdict(one) | {"tokens": list(one.tokens)}
        segments.append(fields | {name: round(fields[name], 3) for name in _ROUNDED})
    return {
        "task": transcript.task, "language": NAMES.get(transcript.language, transcript.language),
        "duration": round(transcript.duration, 3), "text": transcript.text, "segments": segments,
    }  # fmt: skip


def as_srt(transcript: Transcript) -> str:
    """SubRip: numbers from 1, times with a comma, an empty line after each."""
    parts = []
    for number, one in enumerate(_shown(transcript), 1):
        begin, end = (_time(at, ",", hours=True) for at in (one.start, one.end))
        parts.append(f"{number}\n{begin} --> {end}\n{_line(one.text)}\n\n")
    return "".join(parts)


def as_vtt(transcript: Transcript) -> str:
    """WebVTT: times with a point, and hours where there are some."""
    parts = ["WEBVTT\n\n"]
    for one in _shown(transcript):
        begin, end = (_time(at, ".", hours=False) for at in (one.start, one.end))
        parts.append(f"{begin} --> {end}\n{_line(one.text)}\n\n")
    return "".join(parts)


FORMATS: Mapping[str, Callable[[Transcript], str]] = {
    "txt": as_text,
    "json": as_json,
    "srt": as_srt,
    "vtt": as_vtt,
    "verbose_json": as_verbose_json,
}


def _shown(transcript: Transcript) -> Iterator[Segment]:
    return (one for one in transcript.segments if one.text.strip())


def _line(text: str) -> str:
    """A text of one line, which cannot be taken for times."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str, *, hours: bool) -> str:
    whole = round(seconds * 1000)
    h, m, s, ms = whole // 3_600_000, whole // 60_000 % 60, whole // 1000 % 60, whole % 1000
    return (f"{h:02d}:" if h or hours else "") + f"{m:02d}:{s:02d}{point}{ms:03d}"
