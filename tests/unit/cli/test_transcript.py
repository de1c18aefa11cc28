"""Saved chats: what is written comes back, and what is broken changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.transcript import Transcript, load_transcript, save_transcript
from mlcpipe.errors import UsageError

MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "¿Qué? 👋\n\x1b[31m"},
    {"role": "assistant", "content": "日本"},
)


def test_round_trip(tmp_path: Path) -> None:
    saved = Transcript(MESSAGES, Settings().with_values({"seed": 3, "temperature": 0}), "a model")
    save_transcript(tmp_path / "chat.json", saved)
    save_transcript(tmp_path / "chat.json", saved)  # a saved chat may be replaced
    assert load_transcript(tmp_path / "chat.json") == saved
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "thesis.json"
    for content in ('{"a": 1}', json.dumps(good() | {"version": 2})):
        other.write_text(content)
        with pytest.raises(UsageError, match="does not overwrite"):
            save_transcript(other, Transcript((), Settings()))
        assert other.read_text() == content
    with pytest.raises(UsageError):
        save_transcript(tmp_path, Transcript((), Settings()))
    with pytest.raises(UsageError):
        save_transcript(tmp_path / "no" / "folder.json", Transcript((), Settings()))


def good() -> dict[str, Any]:
    return {
        "format": "mlcpipe-chat",
        "version": 1,
        "model": "m",
        "settings": {"top_k": 2},
        "messages": [dict(message) for message in MESSAGES],
    }


def test_the_good_one_is_good(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(good()))
    assert load_transcript(path).settings.sampling.top_k == 2


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"model": 3},
        {"settings": []},
        {"settings": {"top_k": "many"}},
        {"settings": {"nonsense": 1}},
        {"messages": None},
        {"messages": "hi"},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "a", "extra": 1}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
        {"messages": [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "b"}]},
        {"messages": [["user", "a"]]},
        {"messages": [{"role": "user", "content": "a", "\n\x1b[31m": 1}]},
    ],
)
def test_broken_content(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(good() | change))
    with pytest.raises(UsageError) as caught:
        load_transcript(path)
    assert str(caught.value).isprintable() and str(path) in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"1", b'{"format": NaN}'])
def test_broken_files(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(raw)
    with pytest.raises(UsageError):
        load_transcript(path)


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path, Path("a\0b")):
        with pytest.raises(UsageError):
            load_transcript(path)
