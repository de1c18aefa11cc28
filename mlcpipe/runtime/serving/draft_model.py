"""Drafts by a smaller model: the next tokens of all answers, one of each at a time, while a larger one waits.

It draws as the larger model will, with the same settings and the same random numbers, so that drafts stand about as
often at any temperature (speculative decoding, Leviathan et al. 2022, with equal tokens instead of rejection sampling).
"""

from __future__ import annotations

import itertools
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass, replace

from mlcpipe.errors import UsageError, last_line
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Lookup, Search
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import Request, Sequence, State
from mlcpipe.runtime.serving.step import FewRows, ManyRows, Step
from mlcpipe.runtime.text.tokenizer import Tokenizer

_MOST_EACH = 8  # tokens of a draft
_FEW = 4  # tokens that are behind and computed as those of an answer are; more are computed as a prompt
_TRIALS = 8  # rounds of drafts before the costs are known
_AGAIN = 64  # steps without drafts, after which one round tells whether they are worth it by now
_SAVED = 0.2  # of a step, that drafts are taken to save where they are worth it
_STEP = 0.1  # how far one draft moves the rate that others begin with
_PRIOR_TOKENS = 8  # of an answer, that count as much as the rate that it begins with
# How far one token moves an answer's rate later on. With 0.2 a rate of 0.7 is taken for less than 0.35, where nothing
# is drafted any more, every few dozen tokens.
_LEAST_STEP = 0.05


class ModelDrafter:
    """Proposes how one answer goes on: what its texts say where that was right more often, else what the model says.

    `params` is how the answer is drawn. It is the `Drafter` of its request. `followed`: whether the model keeps up with
    the answer; None before it begins.
    """

    followed: bool | None = None

    def __init__(self, model: DraftSource, lookup: Lookup, row: Row) -> None:
        self.lookup, self.rate = lookup, model.rate
        self.row = copy(row)
        self.row.matcher = None  # what a grammar does not allow is cut off below
        self._model, self._allowed = model, row.allowed
        self._draft: list[int] = []
        self._length = 0  # of the text that the draft goes on from
        self._checked = 0  # tokens of the model's
        self._from_model = False

    def hold(self, tokens: list[int], length: int) -> None:
        """The model's proposal after `length` tokens."""
        self._draft, self._length = tokens, length

    def propose(self, tokens: Many[int]) -> Draft:
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
    """What guesses the next tokens of all answers under way, one of each at a time, where that is worth its time.

    `rate` is how often its drafts stood of late: what an answer begins with.
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
        """How likely each token of a draft was to stand."""
        self.rate += _STEP * (rate - self.rate)

    def propose(self, scheduler: Scheduler) -> None:
        """Have the drafters of the answers under way hold what may come next, where that is worth its time."""
        if self._failed:
            return
        running = scheduler.residency.running
        pairs = [(one, drafter) for one in running if (drafter := self._follows(one)) is not None]
        try:
            self._follow_step()
            length = self._length(scheduler, [drafter.rate for _, drafter in pairs]) if pairs else 0
            if length:
                self._draft(pairs, length)
            if pairs:
                keys = sum(len(one.tokens) for one in running)
                step = scheduler.cost.few_seconds(Load(few=len(running), few_keys=keys))
                self._following.learn(self._followed_s, _SAVED * step if length else 0.0, step)
        except Exception as error:  # answers need no drafts
            self._failed = True
            warnings.warn(f"{self.name} failed, answers go on without drafts: {last_line(error)}", stacklevel=2)

    def _follows(self, one: Sequence) -> ModelDrafter | None:
        """The drafter of an answer that the model keeps up with: of all, or of some where that alone takes too long."""
        drafter = one.request.drafter
        if not isinstance(drafter, ModelDrafter):
            return None
        if drafter.followed is None:
            drafter.followed = self._following.pays()
        return drafter if drafter.followed else None

    def _length(self, scheduler: Scheduler, rates: list[float]) -> int:
        """How many tokens to propose to each."""
        running, most = scheduler.residency.running, min(self.most, MOST_DRAFTED // len(rates))
        most = min(most, scheduler.limits.few_rows // len(running) - 1)
        if most < 1 or not scheduler.searches:
            return 0
        if self._rounds < _TRIALS:
            return min(3, most)
        keys = sum(len(one.tokens) for one in running)
        token_s = self._cost.seconds(self._load(len(rates), keys))
        length = scheduler.cost.draft_length(Load(few=len(running), few_keys=keys), rates, token_s, most)
        self._without = 0 if length else self._without + 1
        return length or int(self._without % _AGAIN == 0)

    def _follow_step(self) -> None:  # noqa: B027  # most need nothing
        """Take what is needed of the step that was computed last; `_followed_s` is what that took for answers."""

    @abstractmethod
    def _load(self, rows: int, keys: int) -> Load:
        """Of one token for each of so many answers, which have so many keys."""

    @abstractmethod
    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        """Have the drafters hold `length` tokens each, and count a round."""


@dataclass(eq=False)
class _Twin:
    """A sequence of the draft model: the first `known` of its tokens are those of the answer, the rest is drafted."""

    sequence: Sequence
    known: int


class DraftModel(DraftSource):
    """A bundle that drafts for another one, over a KV cache of `kv_tokens` tokens for at most `sequences` answers.

    It computes between the other's steps, in the same thread.
    """

    name = "the draft model"

    def __init__(self, bundle: LoadedBundle, kv_tokens: int, sequences: int) -> None:
        self.bundle = bundle
        self._core = Core(bundle, kv_tokens, Limits(bundle.context_length, sequences=sequences))
        super().__init__(self._core.scheduler.cost)
        self._pool = self._core.scheduler.pool
        self._context = self._core.scheduler.limits.context
        self._twins: dict[Sequence, _Twin] = {}
        self._ids = itertools.count()

    def propose(self, scheduler: Scheduler) -> None:
        """As `DraftSource.propose`."""
        for one in [one for one in self._twins if one.state is not State.RUNNING]:
            self._release(one)
        super().propose(scheduler)
        if self._failed:
            for one in list(self._twins):
                self._release(one)

    def _load(self, rows: int, keys: int) -> Load:
        return Load(few=rows, few_keys=keys)

    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        ready = []
        room = self._core.scheduler.limits.prefill_chunk
        for one, drafter in pairs:
            if len(one.tokens) + length < self._context and (twin := self._follow(one, drafter, length)) is not None:
                room -= self._catch_up(twin, room)
                if twin.sequence.left <= _FEW:
                    ready.append((twin, drafter))
        if not ready:
            return
        self._rounds += 1
        drafts: list[list[int]] = [[] for _ in ready]
        for _ in range(length):
            for draft, token in zip(drafts, self._next([twin.sequence for twin, _ in ready])):
                draft.append(token)
            for (twin, drafter), draft in zip(ready, drafts):
                twin.sequence.tokens.append(draft[-1])
                if (params := drafter.row.after(draft)) is not twin.sequence.request.params:
                    twin.sequence.request = replace(twin.sequence.request, params=params)
        for (twin, drafter), draft in zip(ready, drafts):
            drafter.hold(draft, twin.known)

    def _follow(self, one: Sequence, drafter: ModelDrafter, length: int) -> _Twin | None:
        """The twin of a sequence with the same tokens, and pages for what it computes now; None without pages."""
        twin = self._twins.get(one)
        if twin is None:
            request = Request(tuple(one.tokens), length, params=drafter.row)
            twin = self._twins[one] = _Twin(self._pool.sequence(next(self._ids), request), len(one.tokens))
            twin.sequence.dropped = one.dropped
        mine, same = twin.sequence, twin.known
        while same < min(len(one.tokens), len(mine.tokens)) and one.tokens[same] == mine.tokens[same]:
            same += 1
        mine.tokens[same:] = one.tokens[same:]
        self._pool.truncate(mine, min(mine.computed, len(mine.tokens) - 1, same))
        twin.known = len(mine.tokens)
        mine.request = replace(mine.request, params=drafter.row)
        if self._pool.reserve(mine, mine.left + length):
            return twin
        self._release(one)
        return None

    def _catch_up(self, twin: _Twin, room: int) -> int:
        """Compute tokens that the twin is behind by, at most `room`, as a prompt -> how many."""
        mine = twin.sequence
        rows = min(room, mine.left - 1)
        if mine.left <= _FEW or rows <= 0:
            return 0
        self._compute(Step(time.perf_counter(), many=[ManyRows(mine, mine.computed, rows)]))
        mine.computed += rows
        self._pool.slide(mine)
        return rows

    def _next(self, sequences: list[Sequence]) -> list[int]:
        """The next token of each."""
        rows = [FewRows(one, one.tokens[one.computed :], 1) for one in sequences]
        tokens = self._compute(Step(time.perf_counter(), few=rows))
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
        self._pool.release(self._twins.pop(one).sequence)


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
