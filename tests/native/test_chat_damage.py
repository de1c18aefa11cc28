"""Changed files of saved chats, with the hash of what they became, under sanitizers: refused, or read within bounds."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mlcpipe.bundle.states import Part, State, states_hash
from mlcpipe.runtime.chat_file import saved_units
from tests.chat_files import made_file
from tests.native.cxx import FUZZED, RUNTIME, SANITIZED, Cxx, find_clang
from tests.native.fuzzing import FUZZ_S
from tests.once import Once

SOURCES = [
    Path(__file__).with_name("chat_file_fuzz.cc"),
    *(RUNTIME / name for name in ("chat_file.cc", "atomic_file.cc")),
    *(RUNTIME / "bundle" / f"{name}.cc" for name in ("files", "sha256", "states")),
]
# As in chat_file_fuzz.cc.
STATES = (
    State(name="0", kind="pages", copies=2, layers=(0,), parts=(
        Part(name="keys", dtype="float16", shape=(8, 16), token_axis=1),
        Part(name="values", dtype="float16", shape=(16, 8), token_axis=0))),
    State(name="1", kind="pages", window=20, layers=(1,), parts=(
        Part(name="keys", dtype="int8", shape=(4, 16, 2), token_axis=1),
        Part(name="scales", dtype="float16", shape=(1, 16), token_axis=1))),
    State(name="2", kind="slot", dtype="float32", layers=(2,), parts=(Part(name="rows", dtype="float32", shape=(2, 9)),)),
)  # fmt: skip


def small_file(folder: Path, tokens: int = 48) -> Path:
    """For a model with all kinds of states, of which pages before a window are left out."""
    path, nbytes = folder / "chat", sum(saved_units(state, tokens) * state.unit_bytes for state in STATES)
    assert nbytes == 3 * 1024 + 2 * 160 + 72
    path.write_bytes(made_file(nbytes, states_hash(STATES), "float16", "\0", tokens))
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
