"""Faults that strace injects: a system call kills the process, or fails. Skips where strace cannot trace."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# What changes a file system. Of openat only those that make a file count.
CALLS = (
    "write", "pwrite64", "writev", "openat", "mkdir", "rename", "renameat2", "unlink", "unlinkat", "rmdir", "fsync",
    "ftruncate", "symlink", "link", "utimensat", "chmod", "fchmod",
)  # fmt: skip
ALLOCATING = ("write", "pwrite64", "writev", "openat", "mkdir", "rename", "fsync", "symlink")


@dataclass(frozen=True)
class Point:
    """The `nth` call of `call` by the main thread of a command, and what it was."""

    call: str
    nth: int
    text: str


@functools.cache
def _can_trace() -> bool:
    return shutil.which("strace") is not None and not subprocess.run(["strace", "-o", "/dev/null", "true"]).returncode


def traced(
    command: Sequence[str], options: Sequence[str], env: Mapping[str, str] | None = None, log: Path = Path("/dev/null")
) -> subprocess.CompletedProcess[str]:
    """Run a command under `strace OPTIONS`; of its threads and children only the first thread is traced."""
    if not _can_trace():
        pytest.skip("strace is not installed, or may not trace")
    line = ["strace", "-qq", "-y", "-o", str(log), *options, *command]
    return subprocess.run(line, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)


def points(command: Sequence[str], folder: Path, log: Path, env: Mapping[str, str] | None = None) -> list[Point]:
    """Run a command; each of its calls that changed something below `folder`."""
    done = traced(command, ["-e", f"trace={','.join(CALLS)}"], env, log)
    assert done.returncode == 0, done.stderr
    counts: Counter[str] = Counter()
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if (match := re.match(r"(\w+)\(", line)) is None:
            continue
        counts[match[1]] += 1
        if str(folder) in line and (match[1] != "openat" or "O_CREAT" in line):
            found.append(Point(match[1], counts[match[1]], line))
    return found


def struck(
    command: Sequence[str], point: Point, fault: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with a fault at a point: `signal=KILL` or `error=ENOSPC`."""
    return traced(command, ["-e", f"trace={point.call}", "-e", f"inject={point.call}:{fault}:when={point.nth}"], env)
