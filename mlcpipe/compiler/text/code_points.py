"""The code points of character classes, from the installed `tokenizers`, so that both have one Unicode version."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

Members = NDArray[np.bool_]  # of each code point

COUNT = 0x110000
SURROGATES = slice(0xD800, 0xE000)
# Ranges without characters in any Unicode version, or with private ones: the first stands for all up to the next.
_ALIKE = (0x34000, 0xE0000, 0xE1000, 0xF0000, 0xFFFFE, 0x100000, 0x10FFFE, COUNT)


def of_codes(codes: Any) -> Members:
    """The class of these code points: an index, a slice or a list of them."""
    members = np.zeros(COUNT, np.bool_)
    members[codes] = True
    return members


@lru_cache(maxsize=256)
def of_pattern(source: str) -> Members:
    """The code points that a pattern for one character matches."""
    every = "\\x" in source or "\\u" in source or any(ord(char) >= _ALIKE[0] for char in source)
    codes = some_codes(every)
    rest = _pieces(pre_tokenizers.Split(Regex(f"(?:{source})+"), "removed"), codes)
    return _members(codes, ~_covered(len(codes), rest), every)


@lru_cache(maxsize=1)
def numeric() -> Members:
    """The digits of the pre-tokenizer Digits."""
    codes = some_codes(False)
    runs = _pieces(pre_tokenizers.Digits(individual_digits=False), codes)  # U+0000, not a digit, is in the first
    return _members(codes, _covered(len(codes), runs[1::2]), False)


@lru_cache(maxsize=1)
def punctuation() -> Members:
    """The signs of the pre-tokenizer Punctuation."""
    codes = some_codes(False)
    return _members(codes, ~_covered(len(codes), _pieces(pre_tokenizers.Punctuation("removed"), codes)), False)


@lru_cache(maxsize=1)
def word() -> Members:
    """Word characters, which must not adjoin an added token of a single word."""
    library = Tokenizer(models.WordLevel({"X": 0}, unk_token="X"))
    library.add_tokens([AddedToken("\0", single_word=True, normalized=False)])
    codes = some_codes(False)
    # Each character followed by the token, which is found unless a word character precedes it.
    found = library.encode("".join(f"{chr(code)}\0\n" for code in codes)).offsets
    alone = [start // 3 for start, end in found if end == start + 1 and start % 3 == 1]
    chosen = np.ones(len(codes), np.bool_)
    chosen[alone] = False
    return _members(codes, chosen, False)


def scalars() -> Members:
    """Every code point except the surrogates."""
    members = np.ones(COUNT, np.bool_)
    members[SURROGATES] = False
    return members


def some_codes(every: bool) -> NDArray[np.intp]:
    """Every code point except surrogates, or only those that can differ from the one before."""
    chosen = scalars()
    for first, after in [] if every else zip(_ALIKE, _ALIKE[1:], strict=False):
        chosen[first + 1 : after] = first == 0xE0000
    return np.flatnonzero(chosen)


def _pieces(step: pre_tokenizers.PreTokenizer, codes: NDArray[np.intp]) -> list[tuple[int, int]]:
    return [span for _, span in step.pre_tokenize_str("".join(map(chr, codes)))]


def _covered(count: int, spans: list[tuple[int, int]]) -> Members:
    covered = np.zeros(count, np.bool_)
    for start, end in spans:
        covered[start:end] = True
    return covered


def _members(codes: NDArray[np.intp], chosen: Members, every: bool) -> Members:
    members = of_codes(codes[chosen])
    for first, after in [] if every else zip(_ALIKE, _ALIKE[1:], strict=False):
        if first != 0xE0000:
            members[first:after] = members[first]
    return members
