"""Changed files of saved chats, with the hash of what they became, under sanitizers: refused, or read within bounds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.chat_files import made_file
from tests.native.cxx import FUZZED, RUNTIME, SANITIZED, Cxx, find_clang
from tests.native.fuzzing import FUZZ_S
from tests.once import Once

SOURCES = [
    Path(__file__).with_name("chat_file_fuzz.cc"),
    *(RUNTIME / name for name in ("chat_file.cc", "atomic_file.cc", "bundle/files.cc", "bundle/sha256.cc")),
]


def small_file(folder: Path) -> Path:
    """Of 32 tokens, for a model of two layers."""
    path = folder / "chat"
    path.write_bytes(made_file(2 * 2 * 2048, "\0", "float16", "\0"))
    return path


@pytest.mark.full
def test_sanitizers_find_nothing_in_thousands_of_changed_files(cxx: Cxx, tmp_path: Path) -> None:
    damage = cxx.program(SOURCES, *SANITIZED)
    command = [damage, small_file(tmp_path), "4000", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 100 < int(done.stdout) < 3900, done.stdout


@pytest.mark.everything
def test_libfuzzer_finds_nothing(once: Once, tmp_path: Path) -> None:
    fuzz = find_clang(once).program(SOURCES, *FUZZED, "-DMLCPIPE_FUZZ")
    (tmp_path / "corpus").mkdir()
    shutil.move(small_file(tmp_path), tmp_path / "corpus" / "chat")
    limits = [f"-max_total_time={FUZZ_S}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=20000"]
    done = subprocess.run([fuzz, *limits, "corpus"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
