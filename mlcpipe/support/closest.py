"""Closest matches for a name that does not exist: of targets, devices, quantizations and variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_SHOWN = 3


def closest(name: str, known: Iterable[str], others: Mapping[str, str] | None = None, usual: str = "") -> str:
    """Up to three of `known` that `name` may stand for, as "a, b or c"; if none is like it `usual`, else the first.

    Upper case does not matter. `others` are words that people use elsewhere, each with what it is here.
    """
    import difflib

    names, word = list(known), name.strip().lower()
    meant = next((one for one in names if one.lower() == word), (others or {}).get(word))
    if meant is not None:
        return meant
    lower = {one.lower(): one for one in names}
    found = difflib.get_close_matches(word, lower, _SHOWN, 0.5)
    if not found and usual:
        return usual
    found = found or list(lower)[:_SHOWN]
    return " or ".join(", ".join(lower[one] for one in found).rsplit(", ", 1))
