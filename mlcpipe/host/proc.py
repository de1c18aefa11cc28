"""Files of Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def first_values(path: str) -> dict[str, str]:
    """The first value of each "key: value" line of a file in /proc; {} if the file is missing."""
    try:
        return first_values_of(Path(path).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def first_values_of(text: str) -> dict[str, str]:
    """The first value of each "key: value" line."""
    entries: dict[str, str] = {}
    for key, colon, value in (line.partition(":") for line in text.splitlines()):
        if colon:
            entries.setdefault(key.strip(), value.strip())
    return entries
