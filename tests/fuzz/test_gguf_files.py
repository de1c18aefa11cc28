"""Damaged GGUF files are read or refused in one line, in bounded memory and time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the valid file is written by the gguf package")
resource = pytest.importorskip("resource", reason="memory is measured by getrusage")

from mlcpipe.checkpoint import open_checkpoint
from tests.conftest import TinyLlama, write_llama
from tests.fuzz.findings import finding
from tests.fuzz.gguf_files import fuzz, open_all
from tests.unit.checkpoint.gguf_files import write_gguf

CASES = 400
MAX_GROWTH_BYTES = 512 << 20


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized llama of one layer."""
    folder = tmp_path_factory.mktemp("llama")
    sizes = TinyLlama(hidden_size=32, intermediate_size=32, heads=2, kv_heads=1, head_dim=16, layers=1)
    source = open_checkpoint(write_llama(folder, sizes))
    return write_gguf(source, folder / "valid.gguf", gguf.GGMLQuantizationType.Q8_0)


def _resident_bytes() -> int:
    kilobytes: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


def test_some_damaged_files(valid: Path, tmp_path: Path) -> None:
    assert finding(lambda: open_all(valid)) == ""
    before = _resident_bytes()
    assert fuzz(valid, tmp_path, range(CASES), 600) == []
    assert _resident_bytes() - before < MAX_GROWTH_BYTES


@pytest.mark.everything
def test_damaged_files_for_an_hour(valid: Path, tmp_path: Path) -> None:
    """Seeds that no run before had; MLCPIPE_FUZZ_SECONDS sets another time."""
    first, seconds = int(time.time()) * 1_000_000, float(os.environ.get("MLCPIPE_FUZZ_SECONDS", "3600"))
    before = _resident_bytes()
    assert fuzz(valid, tmp_path, range(first, first + 10**9), seconds) == []
    assert _resident_bytes() - before < MAX_GROWTH_BYTES
