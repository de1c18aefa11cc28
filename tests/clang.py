"""Where clang is."""

from __future__ import annotations

import shutil
import subprocess

_NAMES = ("clang", *(f"clang-{version}" for version in range(21, 13, -1)))


def system_clang(oldest: int = 14) -> str | None:
    """The path of the system's clang of a version or later."""
    paths = filter(None, map(shutil.which, _NAMES))
    return next((path for path in paths if _version(path) >= oldest), None)


def _version(path: str) -> int:
    done = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False)
    major = done.stdout.partition(".")[0]
    return int(major) if major.isdigit() else 0
