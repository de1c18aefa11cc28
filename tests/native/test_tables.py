"""Tables that Python writes are what C++ reads, and damaged ones are refused."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest

from mlcpipe.compiler.text.tables import strings, tables
from tests.native.cxx import Build

SOURCE = Path(__file__).with_name("tables.cc")
_BUNDLE_ERROR = 5


def read(library: ctypes.CDLL, file: bytes) -> tuple[int, str]:
    """The error's code, or 0, and what was read or the error's line."""
    out = ctypes.create_string_buffer(2000)
    words = (ctypes.c_uint64 * (len(file) // 8 + 1))()  # as malloc may give an address that is no multiple of 8
    ctypes.memmove(words, file, len(file))
    return library.read_tables(words, ctypes.c_size_t(len(file)), out, ctypes.c_size_t(2000)), out.value.decode(
        errors="replace"
    )


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return native_library([SOURCE])


@pytest.fixture(scope="module")
def file() -> bytes:
    return tables(b"mlc_test", 3, [np.array([-5, 7, 300], np.int16), *strings([b"one", b"", b"three"])])


def test_cpp_reads_what_python_writes(library: ctypes.CDLL, file: bytes) -> None:
    assert read(library, file) == (0, "one||three|302")


def test_every_cut_and_other_kinds_are_refused(library: ctypes.CDLL, file: bytes) -> None:
    cuts = [file[:length] for length in range(len(file))]
    for damaged in [*cuts, file + b"\0", b"X" + file[1:], file[:8] + b"\4" + file[9:], file[:12] + b"\2" + file[13:]]:
        code, line = read(library, damaged)
        assert code == _BUNDLE_ERROR and line.startswith("a damaged file of tables in mlc_test; expected "), line


def test_changed_bytes_are_read_or_refused(library: ctypes.CDLL, file: bytes) -> None:
    draw, codes = random.Random(1), set()
    for _ in range(3000):
        damaged = bytearray(file)
        damaged[draw.randrange(16, len(file))] = draw.randrange(256)
        codes.add(read(library, bytes(damaged))[0])
    assert codes == {0, _BUNDLE_ERROR}
