"""Finds the built page in the package, or builds it from the sources in a checkout.

Only building the page needs Node. The page is 6 MB, most of it WebLLM, so it is not in git; the 290 KB that
`mlcpipe serve` sends are. A wheel contains it (`make wheel`), so users of a release need no Node.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from mlcpipe.errors import CompileError, UsageError
from mlcpipe.support.resources import chat_page_path

MIN_NODE = (20, 19)
"""Vite 8 requires it; package.json of apps/chat-web pins Vite."""
_SOURCES = (
    "src/**/*",
    "public/**/*",
    "index.html",
    "package.json",
    "package-lock.json",
    "tsconfig.json",
    "*.config.ts",
)
_STAMP = ".built-from"
_TIMEOUT_S = 600


def page_folder(note: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of the built page; builds it first if the sources are present and have changed.

    Args:
        note: called with a line for the user before a slow step.

    Raises:
        UsageError: no built page, and no Node or no sources to build it.
        CompileError: the build failed.
    """
    folder = chat_page_path()
    built = folder / "dist"
    if not (folder / "package.json").is_file():
        if (folder / "index.html").is_file():
            return folder
        raise UsageError(
            "the chat page is not part of this installation",
            where=folder,
            expected="a release wheel, or a checkout",
            next_step="install a release, or run mlcpipe from its repository, after `make page`",
        )
    digest = _digest(folder)
    stamp = folder / _STAMP
    if (built / "index.html").is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == digest:
        return built
    npm = find_npm(folder)
    note("building the chat page (once)")
    installed = folder / "node_modules" / ".package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < (folder / "package-lock.json").stat().st_mtime:
        _run([npm, "ci", "--no-audit", "--no-fund"], folder)
    _run([npm, "run", "build"], folder)
    stamp.write_text(digest + "\n", encoding="utf-8")
    return built


def find_npm(folder: Path) -> str:
    """The npm that builds `folder`. Raises UsageError without npm or if Node is too old."""
    node, npm = shutil.which("node"), shutil.which("npm")
    required = f"Node {MIN_NODE[0]}.{MIN_NODE[1]} or later with npm"
    step = "install Node from https://nodejs.org, or mlcpipe from a release wheel, which includes the page"
    if node is None or npm is None:
        raise UsageError(
            "the chat page must be built first", where=folder, expected=required, found="none", next_step=step
        )
    text = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    version = re.match(r"v(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < MIN_NODE:
        raise UsageError(
            "the chat page must be built first", where=folder, expected=required, found=text, next_step=step
        )
    return npm


def _run(command: list[str], folder: Path) -> None:
    what = f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise CompileError(what, where=folder, expected=f"at most {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise CompileError(what, where=folder, found=" | ".join(lines[-4:])[:600] or f"exit code {done.returncode}")


def _digest(folder: Path) -> str:
    """SHA-256 over names and content of the page's sources."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
