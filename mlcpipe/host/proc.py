"""Files of Linux's /proc and /sys."""

from __future__ import annotations

from pathlib import Path


def system_text(path: Path) -> str:
    """The text of a small system file, "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def first_values(path: str) -> dict[str, str]:
    """The first value of each "key: value" line of a file in /proc; {} if the file is missing."""
    return first_values_of(system_text(Path(path)))


def first_values_of(text: str) -> dict[str, str]:
    """The first value of each "key: value" line."""
    entries: dict[str, str] = {}
    for key, colon, value in (line.partition(":") for line in text.splitlines()):
        if colon:
            entries.setdefault(key.strip(), value.strip())
    return entries
