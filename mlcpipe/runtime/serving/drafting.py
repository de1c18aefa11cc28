"""Drafts of answers from texts at hand: tokens that the model then checks several at a time.

A draft changes no answer: of its tokens those stand that are drawn anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

MOST_DRAFTED = 15  # tokens of all drafts of a step
_LEAST_MATCH, _MOST_MATCH = 2, 8  # tokens in common: a single one says little, a ninth no more
_CANDIDATES = 32  # places that are compared, the latest ones
_STEP = 0.2  # how far one token, right or wrong, moves a rate
_FIRST_RATE = 0.5
_LONG_AGO = -1


class Draft(NamedTuple):
    """Tokens that may come next. Each is right with probability `rate` if those before it are."""

    tokens: list[int]
    rate: float


class Drafter(Protocol):
    """Proposes how one answer goes on."""

    def propose(self, tokens: Many[int]) -> Draft:
        """What may follow these tokens, prompt and answer; they only grow from call to call."""
        ...

    def restart(self) -> None:
        """The next tokens do not continue those of the last call: the context was shifted."""
        ...

    def checked(self, drafted: int, right: int) -> None:
        """The model checked the first `drafted` tokens of the last proposal; the first `right` of them stand."""
        ...


class Lookup:
    """Finds the last tokens of an answer in its prompt, in the answer, or in a text that the client predicts.

    What followed there is the draft (prompt lookup decoding, Saxena 2023). How often a match of so many tokens was
    right is learned from every token, drafted or not. `allowed` says how many tokens of a draft a grammar allows.
    """

    def __init__(
        self, prediction: Many[int] = (), allowed: Callable[[list[int]], int] = len, stops: frozenset[int] = frozenset()
    ) -> None:
        self.predicted = 0, 0  # tokens of the prediction that stand, and that were checked and do not
        self._allowed, self._stops = allowed, stops
        self._prediction = np.array(prediction, np.int32)
        self._text, self._length = np.empty(0, np.int32), 0
        self._begin: int | None = None  # of the answer
        self._rates = [_FIRST_RATE] * (_MOST_MATCH + 1)  # by the length of a match
        self._guess: list[int] = []
        self._match, self._from_prediction = 0, False

    def propose(self, tokens: Many[int]) -> Draft:
        """As `Drafter.propose`."""
        self._learn(tokens[self._length :])
        self._extend(tokens)
        if self._begin == self._length and len(self._prediction):
            match, self._from_prediction, at = _MOST_MATCH, True, 0
        else:
            (match, at), *predicted = map(self._find, (self._text[: self._length], self._prediction))
            self._from_prediction = predicted[0][0] >= max(match, _LEAST_MATCH)
            if self._from_prediction:
                match, at = predicted[0]
        text = self._prediction if self._from_prediction else self._text[: self._length]
        guess = text[at : at + MOST_DRAFTED].tolist() if match else []
        self._match = match
        end = next((at for at, token in enumerate(guess) if token in self._stops), len(guess))
        self._guess = guess[: self._allowed(guess[:end])] if end else []
        return Draft(self._guess, self._rates[self._match])

    def restart(self) -> None:
        """As `Drafter.restart`."""
        self._begin, self._length, self._guess = _LONG_AGO, 0, []

    def checked(self, drafted: int, right: int) -> None:
        """As `Drafter.checked`."""
        if self._from_prediction:
            self.predicted = self.predicted[0] + right, self.predicted[1] + drafted - right

    def _learn(self, came: Many[int]) -> None:
        """The tokens that came since the last proposal say whether it was right, as far as it went."""
        if self._begin is None:
            return
        for guessed, token in zip(self._guess, came):
            self._rates[self._match] += _STEP * ((guessed == token) - self._rates[self._match])
            if guessed != token:
                break

    def _extend(self, tokens: Many[int]) -> None:
        if self._begin is None:
            self._begin = len(tokens)
        if len(tokens) > len(self._text):
            grown = np.empty(max(256, 2 * len(tokens)), np.int32)
            grown[: self._length] = self._text[: self._length]
            self._text = grown
        self._text[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)

    def _find(self, text: NDArray[np.int32]) -> tuple[int, int]:
        """The longest match of the last tokens in a text, the latest of several -> its length, and where it ends."""
        last = self._text[max(0, self._length - _MOST_MATCH) : self._length].tolist()
        best = 0, 0
        if len(last) < _LEAST_MATCH or len(text) < _LEAST_MATCH:
            return best
        # The last token of all has nothing behind it, nor has the one that is looked for.
        for at in (np.flatnonzero(text[:-1] == last[-1])[: -_CANDIDATES - 1 : -1] + 1).tolist():
            before = text[max(0, at - len(last)) : at].tolist()
            match = _common_suffix(before, last)
            if match > max(best[0], _LEAST_MATCH - 1):
                best = match, at
            if match == len(last):
                break
        return best


def _common_suffix(one: Many[int], other: Many[int]) -> int:
    count = 0
    for a, b in zip(reversed(one), reversed(other)):
        if a != b:
            break
        count += 1
    return count
