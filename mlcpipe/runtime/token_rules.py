"""Rules about the next token of an answer that the compiled sampler does not know, for requests that use them.

Some are known before the logits (tokens that may come, tokens that are forced, penalties), others need them. A row with
rules is sampled like the others after its masks, so that its token depends on its own logits, settings and position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.dry import Dry, DryState
from mlcpipe.runtime.random_numbers import Uniforms
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.truncation import Truncation, Truncator

Words = NDArray[np.int32]
_XTC_STREAM = 1  # of random numbers, apart from those that draw tokens


@dataclass(frozen=True)
class ThinkingBudget:
    """An answer may think for `tokens` tokens; then `end_ids` are forced. `begin` and `end` mark thoughts, as bytes.

    `inside`: whether the prompt has begun the thoughts. `again`: whether they may begin later than the answer.
    `vocabulary`: the bytes of each token.
    """

    tokens: int
    begin: bytes
    end: bytes
    end_ids: tuple[int, ...]
    vocabulary: Sequence[bytes] = field(repr=False, compare=False)
    inside: bool = False
    again: bool = False


@dataclass(frozen=True)
class TokenRules:
    """Rules of one request.

    allowed     tokens that may come, None for all
    min_tokens  no token of `stop_ids` comes before as many others
    """

    allowed: frozenset[int] | None = None
    min_tokens: int = 0
    truncation: Truncation = Truncation()
    dry: Dry = Dry()
    budget: ThinkingBudget | None = None
    begun: DryState | None = field(default=None, repr=False, compare=False)  # after the prompt, see `after`

    def after(self, prompt: Sequence[int]) -> TokenRules:
        """These rules for answers to this prompt only, which all start with what is computed here."""
        return self if self.dry.neutral else replace(self, begun=DryState(self.dry, prompt))

    @property
    def neutral(self) -> bool:
        """Whether no token is treated differently."""
        plain = self.allowed is None and not self.min_tokens and self.budget is None
        return plain and self.truncation.neutral and self.dry.neutral


class RowRules:
    """The rules of one answer, and what it has come to."""

    def __init__(
        self, rules: TokenRules, params: SamplingParams, prompt: Sequence[int], stop_ids: Collection[int], seed: int
    ) -> None:
        self._rules, self._stops = rules, [*stop_ids]
        self._answered = 0
        self._dry = None
        if not rules.dry.neutral:
            self._dry = DryState(rules.dry, prompt) if rules.begun is None else rules.begun.copy()
        self._truncator = None if rules.truncation.neutral else Truncator(rules.truncation, params)
        self._numbers = Uniforms(seed, _XTC_STREAM)
        self._thinking = None if rules.budget is None else _Thinking(rules.budget)
        self._allowed: Words | None = None

    @property
    def truncates(self) -> bool:
        """Whether logits decide which tokens remain."""
        return self._truncator is not None

    def compiled(self, params: SamplingParams) -> SamplingParams:
        """The settings that are left for the compiled sampler."""
        return replace(params, top_p=1.0, top_k=0, min_p=0.0) if self.truncates else params

    def restrict(self, words: Words) -> None:
        """Clear the bits of tokens that may not come, in a mask of a grammar or of all tokens. Raises UsageError.

        Where the grammar has no other tokens, it is followed rather than the least number of tokens or the budget.
        """
        if self._rules.allowed is not None:
            if self._allowed is None:
                self._allowed = _mask(len(words), self._rules.allowed)
            words &= self._allowed
            if not words.any():
                raise UsageError("allowed_token_ids", expected="a token that the grammar allows", found="none")
        if self._answered < self._rules.min_tokens:
            _and(words, ~_mask(len(words), self._stops))
        if self._thinking is not None and (forced := self._thinking.forced) is not None:
            _and(words, _mask(len(words), [forced]))

    def penalties(self) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens, and what is added to the logit of each."""
        if self._dry is None:
            return (), ()
        tokens, less = self._dry.penalties()
        return tokens.tolist(), (-less).tolist()

    def left(self, logits: NDArray[np.float32], position: int) -> Words:
        """The mask of the tokens that the logits f32[V] leave, for a row that `truncates`."""
        assert self._truncator is not None
        return _mask(-(-len(logits) // 32), self._truncator.left(logits, self._numbers.at(position)))

    def accept(self, token: int) -> None:
        """Count a sampled token."""
        self._answered += 1
        for part in (self._dry, self._truncator, self._thinking):
            if part is not None:
                part.accept(token)


class _Thinking:
    """Where an answer is: before, inside or after thoughts; and how many tokens these have."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._inside, self._over, self._tail = budget.inside, False, b""
        self._left, self._forcing = budget.tokens, 0  # tokens of the end that came

    @property
    def forced(self) -> int | None:
        """The token that must come."""
        if self._inside and self._left <= 0:
            return self._budget.end_ids[self._forcing]
        return None

    def accept(self, token: int) -> None:
        """Count a sampled token."""
        if self._over:
            return
        self._forcing = self._forcing + 1 if token == self.forced else 0
        self._left -= self._inside
        mark = self._budget.end if self._inside else self._budget.begin
        vocabulary = self._budget.vocabulary
        self._tail += vocabulary[token] if token < len(vocabulary) else b""
        # A forced end may begin with the mark; what follows there comes too.
        if self._forcing == len(self._budget.end_ids) if self._forcing else mark in self._tail:
            self._over = self._inside and not self._budget.again
            self._inside, self._forcing, self._tail = not self._inside, 0, self._tail.rpartition(mark)[2]
        elif self._inside or self._budget.again:
            self._tail = self._tail[-len(mark) :]
        else:
            self._tail = self._tail.lstrip()
            self._over = not mark.startswith(self._tail)


def _and(words: Words, other: Words) -> None:
    """Clear bits, unless none were left."""
    if (words & other).any():
        words &= other


def _mask(count: int, tokens: Set[int] | Sequence[int] | NDArray[np.intp]) -> Words:
    """Words int32[count] with the bits of these tokens."""
    bits, ids = np.zeros(32 * count, bool), np.asarray([*tokens] if isinstance(tokens, Set) else tokens, np.intp)
    bits[ids[ids < len(bits)]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
