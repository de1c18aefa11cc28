"""The native runtime's SHA-256 is that of Python, with the CPU's instructions and without."""

from __future__ import annotations

import ctypes
import hashlib
import random
from pathlib import Path

import pytest

from tests.native.cxx import Build


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return native_library([Path(__file__).with_name("sha256.cc")])


def test_hashes_of_every_length(library: ctypes.CDLL) -> None:
    draw, found = random.Random(5), ctypes.create_string_buffer(64)
    for size in [*range(300), 1 << 16, 100_001]:
        data = draw.randbytes(size)
        library.hash(data, ctypes.c_size_t(size), found)
        assert found.raw.decode() == hashlib.sha256(data).hexdigest(), size


def test_instructions_and_plain_code_agree(library: ctypes.CDLL) -> None:
    data = random.Random(6).randbytes(64 * 9)
    assert all(library.same(data, ctypes.c_size_t(blocks)) for blocks in range(10))
