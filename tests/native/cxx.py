"""Libraries and programs of the native runtime's sources: each object file is compiled once for all of pytest's workers."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clang import system_clang
from tests.once import Once

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "mlcpipe" / "native" / "runtime"
FLAGS = (
    "-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-D_GLIBCXX_ASSERTIONS", f"-I{RUNTIME}",
)  # fmt: skip
# Sanitizers see at least as much of code that is not optimized, which compiles in half the time.
SANITIZED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FUZZED = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")

Build = Callable[..., ctypes.CDLL]


@dataclass(frozen=True)
class Cxx:
    """A compiler of C++, and what it made in this run. Macros among `flags` are those of the first source alone."""

    command: str
    once: Once
    loaded: dict[tuple[object, ...], ctypes.CDLL] = field(default_factory=dict)

    def library(self, sources: Sequence[Path], *flags: str) -> ctypes.CDLL:
        """A shared library, loaded."""
        key = (*sources, *flags)
        if key not in self.loaded:
            self.loaded[key] = ctypes.CDLL(str(self._linked(sources, (*flags, "-shared"), flags)))
        return self.loaded[key]

    def program(self, sources: Sequence[Path], *flags: str) -> Path:
        """An executable file; skips where the compiler has no sanitizers and `flags` ask for them."""
        return self._linked(sources, flags, flags)

    def _linked(self, sources: Sequence[Path], link_flags: Sequence[str], flags: Sequence[str]) -> Path:
        with ThreadPoolExecutor(2) as pool:
            plain = [flag for flag in flags if not flag.startswith("-D")]
            objects = list(pool.map(self._object, sources, [flags, *[plain] * len(sources[1:])]))

        def work(folder: Path) -> str:
            done = self._run(*link_flags, *objects, "-o", str(folder / "linked"))
            return "" if "cannot find" in done else str(folder / "linked")

        linked = self.once(self._name(sources, link_flags), work)
        return Path(linked) if linked else pytest.skip(f"{self.command} has no sanitizers here")

    def _object(self, source: Path, flags: Sequence[str]) -> str:
        def work(folder: Path) -> str:
            self._run(*FLAGS, *flags, "-c", str(source), "-o", str(folder / "object.o"))
            return str(folder / "object.o")

        return str(self.once(self._name([source], (*flags, "-c")), work))

    def _run(self, *words: str) -> str:
        done = subprocess.run([self.command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "cannot find" in done.stderr, done.stderr[-4000:]
        return done.stderr

    def _name(self, sources: Sequence[Path], flags: Sequence[str]) -> str:
        words = " ".join((self.command, *flags, *map(str, sources)))
        return f"cxx-{sources[0].stem}-{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def find_cxx(once: Once) -> Cxx:
    """The system's compiler; skips where there is none."""
    command = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    return Cxx(command, once) if command else pytest.skip("the native runtime's tests need a C++ compiler: g++")


def find_clang(once: Once) -> Cxx:
    """clang, which has libFuzzer; skips where there is none."""
    clang = system_clang()
    return Cxx(clang.replace("clang", "clang++"), once) if clang else pytest.skip("clang, which has libFuzzer")
