"""The chat page's packages, for tests that build it or run its engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.web.page import find_npm
from tests.once import Once

PAGE = Path(__file__).resolve().parents[1] / "apps" / "chat-web"


def npm(*arguments: str) -> None:
    done = subprocess.run(["npm", *arguments], cwd=PAGE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One process at a time: test files run side by side, and all use one node_modules."""
    if sys.platform == "win32":
        pytest.skip("the page's tests need fcntl")
    import fcntl

    with (PAGE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session", name="packages")
def installed_packages() -> Path:
    """apps/chat-web with its packages installed."""
    try:
        find_npm(PAGE)
    except UsageError as error:
        pytest.skip(str(error))
    installed, locked = PAGE / "node_modules" / ".package-lock.json", PAGE / "package-lock.json"
    with alone():
        if not installed.is_file() or installed.stat().st_mtime < locked.stat().st_mtime:
            npm("ci", "--no-audit", "--no-fund")
    return PAGE


def built_once(once: Once, script: str, folder: Path) -> Path:
    """The folder that a script of package.json writes: of all workers the first one runs it, the others read."""

    def build(_work: Path) -> str:
        with alone():
            npm("run", script)
        return str(folder)

    return Path(once(script.replace(":", "_"), build))
