"""Drafts of answers from texts at hand: tokens that the model then checks several at a time.

Drafts never change an answer: a drafted token is accepted only if sampling draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

MOST_DRAFTED = 15  # tokens of all drafts of a step
_LEAST_MATCH, _MOST_MATCH = 2, 8  # tokens in common: a single one says little, a ninth no more
_CANDIDATES = 32  # places with the last two tokens that are compared, the latest ones
_STEP = 0.2  # how far one token, right or wrong, moves a rate
_FIRST_RATE = 0.5
_LITTLE = 0.01  # of a step
_FIRST_LOOKS = 64  # before they can be said not to pay
_SELDOM = 16  # steps, one of which looks even where that does not pay
_STEP_OF_SEARCH = 0.03  # how far one step moves the estimates of what looking costs and saves
_TOKEN_BITS, _NO_TOKEN = 32, 1 << 32


class Draft(NamedTuple):
    """Tokens that may come next. Each is right with probability `rate` if those before it are."""

    tokens: list[int]
    rate: float


class Drafter(Protocol):
    """Proposes the next tokens of one answer."""

    def propose(self, tokens: Sequence[int]) -> Draft:
        """What may follow these tokens, prompt and answer; they only grow from call to call."""
        ...

    def restart(self) -> None:
        """The next tokens do not continue those of the last call: the context was shifted."""
        ...

    def checked(self, drafted: int, right: int) -> None:
        """The model checked the first `drafted` tokens of the last proposal; the first `right` of them are accepted."""
        ...


class Search:
    """Whether to look for drafts: that takes time in each step, of which small models have less than large ones.

    Where it takes more than `_LITTLE` of the steps, and more than drafts saved lately, only some steps look.
    """

    def __init__(self) -> None:
        self._spent = self._saved = self._steps = 0.0  # seconds of those that looked lately
        self._looks = self._passed = 0

    def pays(self) -> bool:
        """Whether to look in the next step."""
        if self._looks < _FIRST_LOOKS or self._spent <= max(self._saved, _LITTLE * self._steps):
            return True
        self._passed = (self._passed + 1) % _SELDOM
        return not self._passed

    def learn(self, spent: float, saved: float, step: float) -> None:
        """Looking took `spent` of the `step` seconds, and its drafts saved `saved` of them, negative for a loss."""
        self._looks += 1
        self._spent += _STEP_OF_SEARCH * (spent - self._spent)
        self._saved += _STEP_OF_SEARCH * (saved - self._saved)
        self._steps += _STEP_OF_SEARCH * (step - self._steps)


class _Text:
    """Tokens, and an index of where each pair of them occurred before."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # where a pair of tokens ended last
        self._earlier: list[int] = [0]  # for each end of a pair, where the same pair ended before; 0 is nowhere
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        before = self.tokens[-1] if self.tokens else _NO_TOKEN
        for end, token in enumerate(tokens, len(self.tokens) + 1):
            pair = before << _TOKEN_BITS | token
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = end
            before = token
        self.tokens += tokens

    def find(self, last: list[int]) -> tuple[int, int]:
        """The longest match of the last tokens of a text, the latest of several -> its length, and where it ends."""
        best, text = (0, 0), self.tokens
        if len(last) < _LEAST_MATCH:
            return best
        at = self._latest.get(last[-2] << _TOKEN_BITS | last[-1], 0)
        if at == len(text):  # nothing follows it
            at = self._earlier[at]
        for _ in range(_CANDIDATES):
            if not at:
                break
            if text[max(0, at - len(last)) : at] == last:
                return len(last), at
            match = _LEAST_MATCH
            while match < at and text[at - match - 1] == last[-match - 1]:
                match += 1
            if match > best[0]:
                best = match, at
            at = self._earlier[at]
        return best


class Lookup:
    """Finds the last tokens of an answer in its prompt, in the answer, or in a text that the client predicts.

    What followed there is the draft (prompt lookup decoding, Saxena 2023). How often a match of a length was right
    is learned from every token, drafted or not. `allowed` says how many tokens of a draft a grammar allows. Negative
    tokens, which are rows of pictures, are in no draft.
    """

    def __init__(
        self,
        prediction: Sequence[int] = (),
        allowed: Callable[[list[int]], int] = len,
        stops: frozenset[int] = frozenset(),
    ) -> None:
        self.predicted = 0, 0  # tokens of the prediction that were accepted, and that were rejected
        self._allowed, self._stops = allowed, stops
        self._prediction, self._text = _Text(prediction), _Text()
        self._begins = True  # the next proposal is the answer's first
        self._rates = [_FIRST_RATE] * (_MOST_MATCH + 1)  # by the length of a match
        self._guess: list[int] = []
        self._match, self._from_prediction = 0, False

    def propose(self, tokens: Sequence[int]) -> Draft:
        """As `Drafter.propose`."""
        came = tokens[len(self._text.tokens) :]
        self._learn(came)
        self._text.extend(came)
        found, predicted, last = self._text, self._prediction, self._text.tokens[-_MOST_MATCH:]
        if self._begins and predicted.tokens:
            match, at, self._from_prediction = _MOST_MATCH, 0, True
        else:
            match, at = found.find(last)
            other = predicted.find(last) if predicted.tokens else (0, 0)
            self._from_prediction = other[0] >= max(match, _LEAST_MATCH)
            if self._from_prediction:
                match, at = other
        if self._from_prediction:
            found = predicted
        self._begins, self._match = False, match
        guess = found.tokens[at : at + MOST_DRAFTED] if match else []
        end = next((at for at, token in enumerate(guess) if token in self._stops or token < 0), len(guess))
        self._guess = guess[: self._allowed(guess[:end])] if end else []
        return Draft(self._guess, self._rates[match])

    def restart(self) -> None:
        """As `Drafter.restart`."""
        self._begins, self._text, self._guess = False, _Text(), []

    def checked(self, drafted: int, right: int) -> None:
        """As `Drafter.checked`."""
        if self._from_prediction:
            self.predicted = self.predicted[0] + right, self.predicted[1] + drafted - right

    def _learn(self, came: Sequence[int]) -> None:
        """Compare the tokens since the last proposal with it."""
        for guessed, token in zip(self._guess, came):
            self._rates[self._match] += _STEP * ((guessed == token) - self._rates[self._match])
            if guessed != token:
                break
