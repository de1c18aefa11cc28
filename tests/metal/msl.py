"""Generated Metal kernels through clang, which knows address spaces: types, names, and memory of a threadgroup."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.clang import system_clang

_FOLDER = Path(__file__).parent / "msl"
# A variable of a threadgroup stands in a function, which C++ allows of static ones only.
SHARED = re.compile(r"^(\s+)threadgroup (\w+) (\w+)\[(\d+)\];", re.MULTILINE)
# Of one number or vector it is a variable: TVM writes many, of which few are in use at once.
_PRIVATE = re.compile(r"^\s+thread (\w+) \w+\[(?!1\])(\d+)\];", re.MULTILINE)
_NAME = re.compile(r"^kernel void (\w+)\(", re.MULTILINE)
_BUFFER = re.compile(r"\[\[ buffer\(\d+\) \]\]")
_INCLUDE = "#include <metal_stdlib>\n"  # each kernel begins with it
_BYTES = {
    "half": 2,
    "float": 4,
    "int": 4,
    "uint": 4,
    "long": 8,
    "char": 1,
    "uchar": 1,
    "short": 2,
    "ushort": 2,
    "bool": 1,
}


@dataclass(frozen=True)
class Needs:
    """Of a kernel: bytes of its threadgroup's memory and of arrays of one thread, and its buffers."""

    kernel: str
    shared_bytes: int
    private_bytes: int
    buffers: int


def find_clang(oldest: int = 14) -> tuple[str, ...] | None:
    """The command of a clang of a version or later: that of ziglang, else the system's."""
    if find_spec("ziglang") is not None:
        return sys.executable, "-m", "ziglang", "clang"
    path = system_clang(oldest)
    return None if path is None else (path,)


def errors_of(source: str, clang: Sequence[str]) -> list[str]:
    """What clang says against a source of kernels, each of which has its own includes."""
    parts = source.split(_INCLUDE)[1:]
    text = _INCLUDE + "".join(f"namespace kernel_{i} {{{part}}}\n" for i, part in enumerate(parts))
    text = SHARED.sub(r"\1static threadgroup \2 \3[\4];", text)
    command = [*clang, "-target", "arm64-apple-macos13", "-x", "c++", "-std=c++14", "-fsyntax-only", "-nostdinc", "-w"]
    command += [f"-I{_FOLDER}", "-ferror-limit=20", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    found = [line for line in done.stderr.splitlines() if "error:" in line]
    assert (done.returncode == 0) == (not found), done.stderr[:500]
    return found


def needs(source: str) -> list[Needs]:
    """What each kernel of a source takes."""
    found = []
    for part in source.split(_INCLUDE)[1:]:
        match = _NAME.search(part)
        assert match is not None, part[:200]
        shared = sum(_bytes(kind) * int(count) for _, kind, _, count in SHARED.findall(part))
        private = sum(_bytes(kind) * int(count) for kind, count in _PRIVATE.findall(part))
        found.append(Needs(match[1], shared, private, len(_BUFFER.findall(part))))
    return found


def _bytes(kind: str) -> int:
    """Of a number or a vector such as uint4."""
    name = kind.rstrip("234")
    return _BYTES[name] * int(kind[len(name) :] or 1)
