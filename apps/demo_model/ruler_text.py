"""The text of the ruler: documentation from Debian's packages, cut into a part to train on and a held-out part.

The packages are fetched with apt and unpacked into a cache folder; nothing is installed, and no text is committed.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "python3.11-doc",
    "debian-handbook",
    "debian-policy",
    "developers-reference",
    "git-doc",
)
"""Of Debian 12."""
PATTERNS = (
    "usr/share/doc/python3.11/html/_sources/**/*.rst.txt",
    "usr/share/doc/debian-handbook/html/en-US/*.html",
    "usr/share/doc/debian-policy/policy.html/_sources/*.txt",
    "usr/share/developers-reference/_sources/*.txt",
    "usr/share/doc/git-doc/**/*.txt",
)
_LEAST_CHARACTERS = 400  # shorter files are indexes
_HELD_OUT = 20  # one file of so many
_BLOCKS = re.compile(r"</(p|div|li|h\d|dt|dd|tr|pre|title)>|<br ?/?>")
_DROPPED = re.compile(r"<(script|style|head)\b.*?</\1>|<[^>]*>", re.DOTALL)


@dataclass(frozen=True)
class Text:
    """Documents to train on, and those that the model never sees."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


def download(folder: Path) -> None:
    """Fetch the packages into `folder` and unpack them there; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, env={**os.environ, "LC_ALL": "C"})
        for file in folder.glob(f"{package}_*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, folder], check=True)


def read(folder: Path) -> Text:
    """The documents under a folder that `download` filled. Which are held out depends on their names alone."""
    parts: tuple[list[str], list[str]] = ([], [])
    for path in sorted({path for pattern in PATTERNS for path in folder.glob(pattern)}):
        text = _plain(path)
        if len(text) >= _LEAST_CHARACTERS:
            digest = hashlib.sha256(str(path.relative_to(folder)).encode()).digest()
            parts[digest[0] % _HELD_OUT == 0].append(text)
    if not all(parts):
        raise SystemExit(f"{folder} has no documentation: the packages are {', '.join(PACKAGES)}")
    return Text(tuple(parts[0]), tuple(parts[1]))


def _plain(path: Path) -> str:
    """The text of a file; of HTML without its tags."""
    text = path.read_text("utf-8", "replace")
    if path.suffix == ".html":
        text = html.unescape(_DROPPED.sub("", _BLOCKS.sub("\n", text)))
    lines = [line.rstrip() for line in text.splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"
