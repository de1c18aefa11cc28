"""The DRY penalty ("don't repeat yourself"): tokens that would lengthen a repetition of the last ones become unlikely.

Of a token that followed an earlier occurrence of the last n tokens, multiplier * base ** (n - allowed_length) is
subtracted from the logit, for the longest such n. Repetitions do not go beyond a sequence breaker. Source:
text-generation-webui #5677 and llama.cpp's `llama_sampler_dry_apply`, whose semantics of tokens these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer

BREAKERS = ("\n", ":", '"', "*")
MAX_BREAKERS = 64
MAX_BREAKER_CHARS = 40  # as llama.cpp
_MAX_TAIL = 20  # tokens of a breaker after its first one, as llama.cpp
_MAX_LOG = 88.7228391  # of a float
_WHOLE: frozenset[tuple[int, ...]] = frozenset({()})
Breakers = Mapping[int, frozenset[tuple[int, ...]]]
"""Of a token with which a breaker begins, the tokens that follow it: none where it holds the whole of it."""


@dataclass(frozen=True)
class Dry:
    """multiplier: 0 for no penalty. last_n: tokens of prompt and answer that are searched, -1 for all, 0 for none.

    Raises UsageError.
    """

    multiplier: float = 0.0
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: Breakers = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("dry_multiplier", self.multiplier, 0.0, 1e6), ("dry_base", self.base, 0.0, 1e6),
            ("dry_allowed_length", self.allowed_length, 0, 1 << 20), ("dry_penalty_last_n", self.last_n, -1, 1 << 30),
        ):  # fmt: skip
            if not low <= value <= high:
                raise UsageError(name, expected=f"a number from {low:g} to {high:g}", found=value)

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing."""
        return self.multiplier == 0 or self.base < 1 or self.last_n == 0


def breakers_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Sequences of tokens that hold each of the texts, which are not empty. Reads the whole vocabulary."""
    words = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    letters = np.frombuffer(b"".join(words), np.uint8)
    ends = np.cumsum([len(word) for word in words])
    holds = np.zeros(len(words), bool)  # the whole of a text
    found: dict[int, set[tuple[int, ...]]] = {}
    for raw in {text.encode() for text in texts}:
        # Where a token has the beginning of the text, up to the text's end or its own.
        places = np.flatnonzero(letters == raw[0])
        owners = np.searchsorted(ends, places, side="right")
        sizes = np.minimum(ends[owners] - places, len(raw))
        for at in range(1, len(raw)):
            same = (sizes <= at) | (letters[np.minimum(places + at, len(letters) - 1)] == raw[at])
            places, owners, sizes = places[same], owners[same], sizes[same]
        whole = sizes == len(raw)
        here = np.zeros(len(words), bool)
        here[owners[whole]] = True
        holds |= here
        for size in np.unique(sizes[~whole]).tolist():
            rest = tuple(tokenizer.encode(raw[size:].decode(errors="ignore"))[:_MAX_TAIL])
            for token in np.unique(owners[(sizes == size) & ~here[owners]]).tolist():
                found.setdefault(token, set()).add(rest)
    made = dict.fromkeys(np.flatnonzero(holds).tolist(), _WHOLE)
    return made | {token: frozenset(tails) | made.get(token, frozenset()) for token, tails in found.items()}


class DryState:
    """The tokens of one prompt and its answer so far."""

    def __init__(self, dry: Dry, prompt: Sequence[int]) -> None:
        self._dry = dry
        self._most = dry.last_n if dry.last_n > 0 else 1 << 62
        given = np.array(prompt[-self._most :], np.int32)
        self._count = len(given)
        self._tokens = np.zeros(2 * self._count + 256, np.int32)
        self._tokens[: self._count] = given
        # How many tokens up to each place are those before the end.
        self._matches = np.zeros(len(self._tokens), np.int32)
        self._matches[: self._count] = _matches(given.tolist())
        self._lengths = sorted({len(tail) for tails in dry.breakers.values() for tail in tails})
        self._broken = self._last_breaker(given.tolist())  # its first place and its last one

    def copy(self) -> DryState:
        """The same tokens, to be continued in another way."""
        made = copy(self)
        made._tokens, made._matches = self._tokens.copy(), self._matches.copy()
        return made

    def accept(self, token: int) -> None:
        """Append a token."""
        if self._count == len(self._tokens):
            self._tokens, self._matches = (np.pad(one, (0, len(one))) for one in (self._tokens, self._matches))
        end = self._count
        self._tokens[end] = token
        self._matches[1:end] = np.where(self._tokens[1:end] == token, self._matches[: end - 1] + 1, 0)
        if end:
            self._matches[0] = self._tokens[0] == token
        self._count += 1
        self._find_breaker(end)

    def penalties(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """Tokens, and what is subtracted of the logit of each."""
        dry, count = self._dry, self._count
        begin = max(0, count - self._most)
        size, allowed = count - begin, dry.allowed_length
        limit = count - 1 - self._broken[1] if self._broken[0] >= begin else size
        none = np.zeros(0, np.int32), np.zeros(0)
        if size <= allowed or limit < allowed:
            return none
        places = np.arange(begin, count - 1)
        lengths = np.minimum(np.minimum(self._matches[begin : count - 1], places - begin + 1), limit)
        some = lengths >= allowed
        if not some.any():
            return none
        followed, found = self._tokens[places[some] + 1], lengths[some]
        order = np.lexsort((found, followed))
        last = np.append(followed[order][1:] != followed[order][:-1], True)  # the longest of each token
        powers = (found[order][last] - allowed).astype(np.float64)
        if dry.base > 1.000001:
            powers = np.minimum(powers, int(_MAX_LOG / math.log(dry.base)))
        return followed[order][last], dry.multiplier * dry.base**powers

    def _last_breaker(self, tokens: list[int]) -> tuple[int, int]:
        """The breaker of these tokens that begins last, of those the longest; (-1, -1) for none."""
        breakers = self._dry.breakers
        for begin in range(len(tokens) - 1, -1, -1) if breakers else ():
            if (tails := breakers.get(tokens[begin])) is not None:
                for length in reversed(self._lengths):
                    end = begin + length
                    if end < len(tokens) and tuple(tokens[begin + 1 : end + 1]) in tails:
                        return begin, end
        return -1, -1

    def _find_breaker(self, end: int) -> None:
        """Look for a breaker that ends at this place; the one that begins last counts, of these the longest."""
        for length in self._lengths:
            begin = end - length
            tails = self._dry.breakers.get(int(self._tokens[begin])) if begin >= 0 else None
            if tails and tuple(self._tokens[begin + 1 : end + 1].tolist()) in tails:
                self._broken = max(self._broken, (begin, end))


def _matches(tokens: list[int]) -> list[int]:
    """For each place, the length of the longest common ending of the tokens up to it and of all: the Z algorithm."""
    turned, count = tokens[::-1], len(tokens)
    found = [0] * count
    left = right = 0
    for at in range(1, count):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < count and turned[length] == turned[at + length]:
            length += 1
        found[at] = length
        if at + length > right:
            left, right = at, at + length
    return found[::-1]
