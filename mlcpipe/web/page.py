"""The built page: in the package where it was built before the wheel, else built from the sources in a checkout.

The page needs Node to be built and nothing to be used. It is 6 MB, most of it WebLLM, so it is not kept in git;
a wheel carries it (`make page` before the wheel is built), so that who installs a release needs no Node.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from mlcpipe.errors import CompileError, UsageError
from mlcpipe.resources import chat_page_path

MIN_NODE = (20, 19)
"""What Vite 8 asks for; package.json of apps/chat-web pins it."""
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
    """The folder of the built page, which is built now if the sources are at hand and newer.

    Args:
        note: gets a line for people when something takes a while.

    Raises:
        UsageError: there is no built page, and no Node to build it or no sources.
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
            next_step="install mlcpipe from a wheel made after `make page`",
        )
    wanted = _digest(folder)
    stamp = folder / _STAMP
    if (built / "index.html").is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == wanted:
        return built
    npm = find_npm(folder)
    note("building the chat page (once)")
    installed = folder / "node_modules" / ".package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < (folder / "package-lock.json").stat().st_mtime:
        _run([npm, "ci", "--no-audit", "--no-fund"], folder)
    _run([npm, "run", "build"], folder)
    stamp.write_text(wanted + "\n", encoding="utf-8")
    return built


def find_npm(folder: Path) -> str:
    """The npm to build `folder` with. Raises UsageError where there is none, or a Node too old for it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    wanted = f"Node {MIN_NODE[0]}.{MIN_NODE[1]} or later with npm"
    step = "install Node from https://nodejs.org, or mlcpipe from a release wheel, which has the page in it"
    if node is None or npm is None:
        raise UsageError(
            "the chat page has to be built first", where=folder, expected=wanted, found="none", next_step=step
        )
    text = subprocess.run([node, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout.strip()
    version = re.match(r"v(\d+)\.(\d+)", text)
    if version is None or (int(version[1]), int(version[2])) < MIN_NODE:
        raise UsageError(
            "the chat page has to be built first", where=folder, expected=wanted, found=text, next_step=step
        )
    return npm


def _run(command: list[str], folder: Path) -> None:
    what = f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise CompileError(what, where=folder, expected=f"an end within {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise CompileError(what, where=folder, found=" | ".join(lines[-4:])[:600] or f"exit code {done.returncode}")


def _digest(folder: Path) -> str:
    """SHA-256 over the names and the content of what the page is built from."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in folder.glob(pattern) if path.is_file()}):
        digest.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
