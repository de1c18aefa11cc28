"""The findings of `mlcpipe doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fact: `state` is "ok", "note", "missing" or "broken"; `advice` is a command to type, or ""."""

    name: str
    state: str
    value: str
    advice: str = ""


def byte_size(count: float) -> str:
    """A size for people: "1.50 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns at its last unit")
