"""Character tables for the native runtime's chat templates, from this Python's str."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache

import numpy as np

# In the order of `Class` and `Case` in mlcpipe/native/runtime/text/value_characters.h.
_CLASSES: dict[str, Callable[[str], bool]] = {
    "unprintable": lambda char: not char.isprintable(),
    "cased": lambda char: (char + "Σ").lower()[-1] == "ς",  # a sigma at the end of a word has its own form
    "ignorable": lambda char: ("A" + char + "Σ").lower()[-1] == "ς" and (char + "Σ").lower()[-1] != "ς",
    "alpha": str.isalpha,
    "decimal": str.isdecimal,
    "digit": str.isdigit,
    "numeric": str.isnumeric,
}
_CASES: dict[str, Callable[[str], str]] = {"lower": str.lower, "upper": str.upper, "title": str.title}
_LOWER = ("lower", "cased", "ignorable")
_ALNUM = ("alpha", "decimal", "digit", "numeric")
# The tables that filters and methods of these names use.
_NEEDS = {
    "capitalize": (*_LOWER, "title"),
    "lower": _LOWER,
    "title": (*_LOWER, "title", "upper"),
    "upper": ("upper",),
    **dict.fromkeys(("float", "int"), ("decimal",)),
    "isalnum": _ALNUM,
    **{f"is{name}": (name,) for name in _ALNUM},
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _LOWER),
}


def character_tables(names: Collection[str]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, str]]]:
    """Ranges (class, first, last) and mappings (case, code point, text) for filters and methods of these names."""
    needed = {"unprintable", *(table for name in names for table in _NEEDS.get(name, ()))}
    ranges = [(kind, *span) for kind, name in enumerate(_CLASSES) if name in needed for span in _ranges(name)]
    cases = [(kind, *pair) for kind, name in enumerate(_CASES) if name in needed for pair in _mappings(name)]
    return ranges, cases


def _chars() -> Iterator[str]:
    """Each UTF-8 character except ASCII, whose rules are in the runtime."""
    return (chr(code) for code in range(128, sys.maxunicode + 1) if not 0xD800 <= code < 0xE000)


@cache
def _ranges(name: str) -> list[tuple[int, int]]:
    member = np.zeros(sys.maxunicode + 3, np.bool_)  # one before the first code point, and one behind the last
    codes = range(sys.maxunicode + 1)
    member[1:-1] = np.fromiter(map(_CLASSES[name], map(chr, codes)), np.bool_, len(codes))
    member[1 + 0xD800 : 1 + 0xE000] = False
    first, behind = np.flatnonzero(member[1:] != member[:-1]).reshape(-1, 2).T.tolist()
    return [(begin, end - 1) for begin, end in zip(first, behind)]


@cache
def _mappings(name: str) -> list[tuple[int, str]]:
    return [(ord(char), changed) for char in _chars() if (changed := _CASES[name](char)) != char]
