"""Drafts by a smaller model: the next tokens of all answers, one of each at a time, while a larger one waits.

It samples as the larger model will, with the same settings and the same random numbers, so that drafts are accepted
about as often at any temperature (speculative decoding, Leviathan et al. 2022, with equal tokens instead of rejection
sampling).
"""

from __future__ import annotations

import itertools
import time
import warnings
from abc import ABC, abstractmethod
from collections import abc
from copy import copy
from dataclasses import dataclass, replace

from mlcpipe.bundle.memory import many_sequences
from mlcpipe.errors import UsageError, last_line
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Lookup, Search
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence, State
from mlcpipe.runtime.serving.step import DecodeRows, PrefillRows, Step
from mlcpipe.runtime.text.tokenizer import Tokenizer

_MOST_EACH = 8  # tokens of a draft
_MAX_DECODE_ROWS = 4  # missing tokens that decode computes; more are computed as a prompt
_TRIALS = 8  # rounds of drafts before the costs are known
_RETRY_AFTER = 64  # steps without drafts, after which one round tells whether they pay now
_MIN_GAIN = 0.2  # share of a step's time that drafting must save
_STEP = 0.1  # how far one draft moves the rate that new answers start with
_PRIOR_TOKENS = 8  # of an answer, that weigh as much as the rate that it started with
# How far one token moves an answer's rate later on. With 0.2 a rate of 0.7 is estimated below 0.35, where drafting
# stops, every few dozen tokens.
_LEAST_STEP = 0.05


class ModelDrafter:
    """Proposes the next tokens of one answer: from its texts where those were right more often, else from the model.

    It is the `Drafter` of its request; `row` is how the answer is sampled. `followed`: whether the model keeps up with
    the answer; None before it starts.
    """

    followed: bool | None = None

    def __init__(self, model: DraftSource, lookup: Lookup, row: Row) -> None:
        self.lookup, self.rate = lookup, model.rate
        self.row = copy(row)
        self.row.matcher = self.row.rules = None  # what a grammar does not allow is cut off below
        self._model, self._allowed = model, row.allowed
        self._draft: list[int] = []
        self._length = 0  # of the text that the draft continues
        self._checked = 0  # tokens from the model
        self._from_model = False

    def hold(self, tokens: list[int], length: int) -> None:
        """The model's proposal after `length` tokens."""
        self._draft, self._length = tokens, length

    def propose(self, tokens: abc.Sequence[int]) -> Draft:
        """As `Drafter.propose`."""
        found = self.lookup.propose(tokens)
        draft = self._draft if self._length == len(tokens) else []
        self._from_model = bool(draft) and not (found.tokens and found.rate > self.rate)
        return Draft(draft[: self._allowed(draft)], self.rate) if self._from_model else found

    def restart(self) -> None:
        """As `Drafter.restart`."""
        self._draft = []
        self.lookup.restart()

    def checked(self, drafted: int, right: int) -> None:
        """As `Drafter.checked`."""
        if not self._from_model:
            self.lookup.checked(drafted, right)
            return
        for stands in [True] * right + [False] * (right < drafted):
            self._checked += 1
            self.rate += max(_LEAST_STEP, 1 / (_PRIOR_TOKENS + self._checked)) * (stands - self.rate)
        self._model.learn(right / (right + (right < drafted)))


class DraftSource(ABC):
    """Drafts the next tokens of all running answers, one of each at a time, where that pays.

    `rate`: how often its drafts were accepted lately; an answer starts with it.
    """

    name = ""
    most = _MOST_EACH  # tokens of a draft

    def __init__(self, cost: CostModel) -> None:
        self.rate = 0.5
        self._cost = cost
        self._rounds, self._without = 0, 0
        self._following, self._followed_s = Search(), 0.0  # whether that pays; what it took of the last step
        self._failed = False  # nothing is drafted any more

    def learn(self, rate: float) -> None:
        """Record how likely each token of a draft was to be accepted."""
        self.rate += _STEP * (rate - self.rate)

    def propose(self, scheduler: Scheduler) -> None:
        """Give the drafters of running answers their drafts, where that pays."""
        if self._failed:
            return
        running = scheduler.admission.running
        pairs = [(one, drafter) for one in running if (drafter := self._follows(one)) is not None]
        try:
            self._follow_step()
            length = self._length(scheduler, [drafter.rate for _, drafter in pairs]) if pairs else 0
            if length:
                self._draft(pairs, length)
            if pairs:
                keys = sum(len(one.tokens) for one in running)
                step = scheduler.cost.decode_seconds(Load(decode=len(running), decode_keys=keys))
                self._following.learn(self._followed_s, _MIN_GAIN * step if length else 0.0, step)
        except Exception as error:  # answers need no drafts
            self._failed = True
            warnings.warn(f"{self.name} failed, answers continue without drafts: {last_line(error)}", stacklevel=2)

    def _follows(self, one: Sequence) -> ModelDrafter | None:
        """The drafter of an answer that the model keeps up with: all of them, or some where that takes too long."""
        drafter = one.request.drafter
        if not isinstance(drafter, ModelDrafter):
            return None
        if drafter.followed is None:
            drafter.followed = self._following.pays()
        return drafter if drafter.followed else None

    def _length(self, scheduler: Scheduler, rates: list[float]) -> int:
        """How many tokens to draft for each."""
        running, most = scheduler.admission.running, min(self.most, MOST_DRAFTED // len(rates))
        most = min(most, scheduler.limits.decode_rows // len(running) - 1)
        if most < 1 or not scheduler.searches:
            return 0
        if self._rounds < _TRIALS:
            return min(3, most)
        keys = sum(len(one.tokens) for one in running)
        token_s = self._cost.seconds(self._load(len(rates), keys))
        length = scheduler.cost.draft_length(Load(decode=len(running), decode_keys=keys), rates, token_s, most)
        self._without = 0 if length else self._without + 1
        return length or int(self._without % _RETRY_AFTER == 0)

    def _follow_step(self) -> None:  # noqa: B027  # most need nothing
        """Take what is needed from the last step; `_followed_s` is how long that took for answers."""

    @abstractmethod
    def _load(self, rows: int, keys: int) -> Load:
        """The load of one token for each of `rows` answers, which have `keys` keys in all."""

    @abstractmethod
    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        """Give the drafters `length` tokens each, and count a round."""


@dataclass(eq=False)
class DraftSequence:
    """The draft model's sequence for an answer, whose tokens its first `known` ones are; the rest is drafted."""

    sequence: Sequence
    known: int


class DraftModel(DraftSource):
    """A bundle that drafts for another one, over a KV cache of `kv_tokens` tokens for at most `sequences` answers.

    It computes between the other's steps, in the same thread.
    """

    name = "the draft model"

    def __init__(self, bundle: LoadedBundle, kv_tokens: int, sequences: int) -> None:
        self.bundle = bundle
        units = many_sequences(bundle.manifest, bundle.context_length, kv_tokens)
        self._core = Core(bundle, units, Limits(bundle.context_length, sequences=sequences))
        super().__init__(self._core.scheduler.cost)
        self._pool = self._core.scheduler.pool
        self._context = self._core.scheduler.limits.context
        self._followers: dict[Sequence, DraftSequence] = {}
        self._ids = itertools.count()

    def propose(self, scheduler: Scheduler) -> None:
        """As `DraftSource.propose`."""
        for one in [one for one in self._followers if one.state is not State.RUNNING]:
            self._release(one)
        super().propose(scheduler)
        if self._failed:
            for one in list(self._followers):
                self._release(one)

    def _load(self, rows: int, keys: int) -> Load:
        return Load(decode=rows, decode_keys=keys)

    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        ready = []
        room = self._core.scheduler.limits.prefill_chunk
        for one, drafter in pairs:
            if (
                len(one.tokens) + length < self._context
                and (follower := self._follow(one, drafter, length)) is not None
            ):
                room -= self._catch_up(follower, room)
                if follower.sequence.left <= _MAX_DECODE_ROWS:
                    ready.append((follower, drafter))
        if not ready:
            return
        self._rounds += 1
        drafts: list[list[int]] = [[] for _ in ready]
        for _ in range(length):
            for draft, token in zip(drafts, self._next([follower.sequence for follower, _ in ready])):
                draft.append(token)
            for (follower, drafter), draft in zip(ready, drafts):
                follower.sequence.tokens.append(draft[-1])
                if (params := drafter.row.after(draft)) is not follower.sequence.request.params:
                    follower.sequence.request = replace(follower.sequence.request, params=params)
        for (follower, drafter), draft in zip(ready, drafts):
            drafter.hold(draft, follower.known)

    def _follow(self, one: Sequence, drafter: ModelDrafter, length: int) -> DraftSequence | None:
        """The draft sequence with the tokens of `one`, and pages for what it computes now; None without pages."""
        follower = self._followers.get(one)
        if follower is None:
            request = ScheduledRequest(tuple(one.tokens), length, params=drafter.row)
            follower = self._followers[one] = DraftSequence(
                self._pool.sequence(next(self._ids), request), len(one.tokens)
            )
            follower.sequence.dropped = one.dropped
        mine, same = follower.sequence, follower.known
        while same < min(len(one.tokens), len(mine.tokens)) and one.tokens[same] == mine.tokens[same]:
            same += 1
        mine.tokens[same:] = one.tokens[same:]
        self._pool.truncate(mine, min(mine.computed, len(mine.tokens) - 1, same))
        follower.known = len(mine.tokens)
        mine.request = replace(mine.request, params=drafter.row)
        if self._pool.reserve(mine, mine.left + length):
            return follower
        self._release(one)
        return None

    def _catch_up(self, follower: DraftSequence, room: int) -> int:
        """Compute missing tokens, at most `room`, as a prompt -> how many."""
        mine = follower.sequence
        rows = min(room, mine.left - 1)
        if mine.left <= _MAX_DECODE_ROWS or rows <= 0:
            return 0
        self._compute(Step(time.perf_counter(), prefill=[PrefillRows(mine, mine.computed, rows)]))
        mine.computed += rows
        self._pool.slide(mine)
        return rows

    def _next(self, sequences: list[Sequence]) -> list[int]:
        """The next token of each."""
        rows = [DecodeRows(one, one.tokens[one.computed :], 1) for one in sequences]
        tokens = self._compute(Step(time.perf_counter(), decode=rows))
        for one in sequences:
            one.computed = len(one.tokens)
            self._pool.slide(one)
        return tokens

    def _compute(self, step: Step) -> list[int]:
        step.copies = self._pool.take_copies()
        tokens = self._core.compute(step)
        self._cost.observe(step.load, time.perf_counter() - step.planned)
        return tokens

    def _release(self, one: Sequence) -> None:
        self._pool.release(self._followers.pop(one).sequence)


def check_pair(target: Tokenizer, draft: Tokenizer) -> None:
    """Raises UsageError where a model cannot draft for another one, as their tokens differ."""
    ours, theirs = (one.library.get_vocab(with_added_tokens=True) for one in (target, draft))
    if ours != theirs:
        text, number = min(ours.items() ^ theirs.items(), key=lambda pair: pair[1])
        raise UsageError(
            "the draft model",
            expected="the tokens of the model that it drafts for",
            found=f"others, from token {number} on ({text!r})",
            next_step="take a smaller model of the same family",
        )
