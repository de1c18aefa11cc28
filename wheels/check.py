"""Checks a library for a wheel as auditwheel does: what it needs exists wherever TVM's wheel runs (manylinux_2_27)."""

from __future__ import annotations

import struct
from pathlib import Path

# TVM's libraries are in its wheel; the others are on every system that a manylinux wheel may be installed on (PEP 600).
ALLOWED = {"libtvm_runtime.so", "libtvm_ffi.so", "libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6",
           "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # fmt: skip
# The newest versions of their symbols there.
NEWEST = {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
_STRINGS, _NEEDED, _RUNPATH, _RPATH, _VERSIONS, _VERSION_COUNT = 5, 1, 29, 15, 0x6FFFFFFE, 0x6FFFFFFF


def check_library(path: Path) -> None:
    """Raise SystemExit for a library that needs another one, a newer one, or looks for them in a folder."""
    needed, versions = needs(path)
    problems = [f"it needs {name}" for name in needed if name not in ALLOWED]
    for version in versions:
        kind, _, number = version.partition("_")
        if tuple(map(int, number.split("."))) > NEWEST.get(kind, ()):
            problems.append(f"it needs {version}")
    if problems:
        raise SystemExit(f"{path.name}: {'; '.join(problems)}")


def needs(path: Path) -> tuple[list[str], list[str]]:
    """The libraries that a shared library needs, and the versions of their symbols. Raises SystemExit for a path."""
    content = path.read_bytes()
    segments = [
        struct.unpack_from("<IIQQQQQQ", content, struct.unpack_from("<Q", content, 32)[0] + 56 * index)
        for index in range(struct.unpack_from("<H", content, 56)[0])
    ]

    def at(address: int) -> int:
        return next(
            one[2] + address - one[3] for one in segments if one[0] == 1 and one[3] <= address < one[3] + one[5]
        )

    place, nbytes = next((one[2], one[5]) for one in segments if one[0] == 2)
    dynamic = list(struct.iter_unpack("<QQ", content[place : place + nbytes]))
    first = dict(reversed(dynamic))
    strings = at(first[_STRINGS])

    def text(offset: int) -> str:
        begin = strings + offset
        return content[begin : content.index(b"\0", begin)].decode()

    if _RUNPATH in first or _RPATH in first:
        raise SystemExit(f"{path.name}: it looks for libraries in a folder")
    versions, entry = [], at(first[_VERSIONS]) if _VERSIONS in first else 0
    for _ in range(first.get(_VERSION_COUNT, 0)):
        _, count, _, inner, following = struct.unpack_from("<HHIII", content, entry)
        one = entry + inner
        for _ in range(count):
            _, _, _, name, next_one = struct.unpack_from("<IHHII", content, one)
            versions.append(text(name))
            one += next_one
        entry += following
    return [text(value) for tag, value in dynamic if tag == _NEEDED], versions
