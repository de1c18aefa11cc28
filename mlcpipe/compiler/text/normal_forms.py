"""Tables of Unicode's normal forms, as the installed `tokenizers` has them."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from tokenizers import normalizers

from mlcpipe.compiler.text import code_points
from mlcpipe.compiler.text.code_points import Members

_HANGUL = range(0xAC00, 0xD7A4)  # composed by arithmetic
_JAMO = slice(0x1161, 0x11C3)  # vowels and last consonants, which join the syllable before them


@dataclass(frozen=True, eq=False)
class NormalForm:
    """`decompositions` are full ones, without Hangul's; `classes` has combining classes other than 0.

    inert         characters that neither change nor join others
    compositions  rows of first, second and composed
    """

    composes: bool
    decompositions: dict[int, str]
    classes: dict[int, int]
    compositions: NDArray[np.uint32]
    inert: Members


@lru_cache(maxsize=4)
def normal_form(name: str) -> NormalForm:
    """NFC, NFD, NFKC or NFKD."""
    chars = [chr(code) for code in code_points.some_codes(False) if code != ord("\n")]
    canonical = _normalized("NFD", chars)
    decomposed = _normalized("NFKD", chars) if "K" in name else canonical
    changed = {
        ord(char): text
        for char, text in zip(chars, decomposed, strict=True)
        if text != char and ord(char) not in _HANGUL
    }
    classes = _combining_classes(chars)
    composes = name.endswith("C")
    compositions = _compositions(chars, canonical) if composes else np.zeros((0, 3), np.uint32)
    inert = code_points.scalars()
    stays = _normalized(name, chars)
    inert[[ord(char) for char, text in zip(chars, stays, strict=True) if text != char]] = False
    inert[list(classes)] = False
    inert[compositions[:, 1]] = False
    inert[_JAMO] = False
    return NormalForm(composes, changed, classes, compositions, inert)


def _normalized(name: str, texts: list[str]) -> list[str]:
    """The form of each text; no text contains the line feed that joins them."""
    form = getattr(normalizers, name)()
    lines: list[str] = form.normalize_str("\n".join(texts)).split("\n")
    return lines


def _compositions(chars: list[str], canonical: list[str]) -> NDArray[np.uint32]:
    several = [
        (char, text) for char, text in zip(chars, canonical, strict=True) if len(text) > 1 and ord(char) not in _HANGUL
    ]
    back = _normalized("NFC", [text for _, text in several])
    pairs = [(char, text) for (char, text), composed in zip(several, back, strict=True) if composed == char]
    begins = _normalized("NFC", [text[:-1] for _, text in pairs])
    rows = sorted((ord(begin), ord(text[-1]), ord(char)) for (char, text), begin in zip(pairs, begins, strict=True))
    return np.array(rows, np.uint32).reshape(-1, 3)


def _combining_classes(chars: list[str]) -> dict[int, int]:
    """Found by the order of two marks: the one of lower class moves first."""
    lowest, highest = "\u0334", "\u0345"  # classes 1 and 240
    above = _normalized("NFD", [f"a{char}{lowest}" for char in chars])
    below = _normalized("NFD", [f"a{highest}{char}" for char in chars])
    marks = [
        char
        for char, one, other in zip(chars, above, below, strict=True)
        if char in (lowest, highest) or one == f"a{lowest}{char}" or other == f"a{char}{highest}"
    ]
    known: dict[int, str] = {}  # a mark of each class
    for char in marks:
        known.setdefault(unicodedata.combining(char), char)
    found = {}
    for char in marks:
        pairs = _normalized("NFD", [f"a{other}{char}" for other in known.values()])
        stays = zip(known.items(), pairs, strict=True)
        found[ord(char)] = max(number for (number, other), pair in stays if pair == f"a{other}{char}")
    return found
