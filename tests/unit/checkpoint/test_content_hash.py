from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from mlcpipe.checkpoint import content_hash
from mlcpipe.checkpoint.content_hash import REMEMBERED_BYTES, file_digest, hash_files
from mlcpipe.errors import CheckpointError


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * REMEMBERED_BYTES)
    os.utime(path, (1000, 1000))
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose content was read, in order."""
    seen: list[Path] = []
    original = content_hash._digest

    def counted(file: Path) -> str:
        seen.append(file)
        return original(file)

    monkeypatch.setattr(content_hash, "_digest", counted)
    return seen


def test_digest_is_sha256(large: Path, tmp_path: Path) -> None:
    expected = hashlib.sha256(large.read_bytes()).hexdigest()
    assert file_digest(large) == expected
    assert file_digest(large, tmp_path / "cache") == expected
    assert file_digest(large, tmp_path / "cache") == expected


def test_a_large_file_is_read_once(large: Path, tmp_path: Path, reads: list[Path]) -> None:
    cache = tmp_path / "new" / "cache"
    for _ in range(3):
        file_digest(large, cache)
    assert reads == [large]
    assert cache.stat().st_mode & 0o077 == 0


def test_without_a_cache_nothing_is_remembered(large: Path, reads: list[Path]) -> None:
    file_digest(large)
    file_digest(large)
    assert len(reads) == 2


def test_a_small_file_is_always_read(tmp_path: Path, reads: list[Path]) -> None:
    small = tmp_path / "config.json"
    small.write_text("{}")
    os.utime(small, (1000, 1000))
    file_digest(small, tmp_path / "cache")
    file_digest(small, tmp_path / "cache")
    assert len(reads) == 2 and not (tmp_path / "cache").exists()


def test_a_changed_file_is_read_again(large: Path, tmp_path: Path, reads: list[Path]) -> None:
    first = file_digest(large, tmp_path / "cache")
    large.write_bytes(b"y" * REMEMBERED_BYTES)
    os.utime(large, (1001, 1001))
    assert file_digest(large, tmp_path / "cache") != first
    other = tmp_path / "other"  # same path, size and time, but another inode
    other.write_bytes(b"z" * REMEMBERED_BYTES)
    os.utime(other, (1001, 1001))
    other.replace(large)
    file_digest(large, tmp_path / "cache")
    with large.open("r+b") as file:  # in place, and the modification time put back
        file.write(b"a")
    os.utime(large, (1001, 1001))
    assert file_digest(large, tmp_path / "cache") == hashlib.sha256(large.read_bytes()).hexdigest()
    assert len(reads) == 4


def test_a_file_written_just_now_is_not_remembered(large: Path, tmp_path: Path, reads: list[Path]) -> None:
    os.utime(large)
    file_digest(large, tmp_path / "cache")
    file_digest(large, tmp_path / "cache")
    assert len(reads) == 2


@pytest.mark.parametrize("content", [b"", b"0" * 63, b"0" * 65, b"G" * 64, b"\xff" * 64])
def test_a_damaged_memory_is_ignored(large: Path, tmp_path: Path, content: bytes, reads: list[Path]) -> None:
    expected = file_digest(large, tmp_path / "cache")
    (slot,) = (tmp_path / "cache").iterdir()
    slot.write_bytes(content)
    assert file_digest(large, tmp_path / "cache") == expected
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_does_not_stop_anything(large: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert file_digest(large, tmp_path / "cache") == file_digest(large)


def test_a_file_that_changes_meanwhile(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meddle(file: Path) -> str:
        file.write_bytes(b"another")
        return "0" * 64

    monkeypatch.setattr(content_hash, "_digest", meddle)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        file_digest(large, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read a file.*gone"):
        file_digest(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="missing file.*gone"):
        hash_files([tmp_path / "gone"])


def test_names_and_borders_count(tmp_path: Path) -> None:
    for name, text in {"a": "xy", "b": "z", "c": "x", "d": "yz"}.items():
        (tmp_path / name).write_text(text)
    a, b, c, d = (tmp_path / name for name in "abcd")
    assert hash_files([a, b]) == hash_files([b, a])
    assert len({hash_files([a, b]), hash_files([c, d]), hash_files([a]), hash_files([a, b, d])}) == 4
