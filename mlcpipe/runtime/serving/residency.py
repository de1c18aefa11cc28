"""Who has pages and a place among the sequences under way, who waits for them, and who gives way."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from mlcpipe.runtime.serving import waiting
from mlcpipe.runtime.serving.limits import Limits, Totals
from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import Sequence, State
from mlcpipe.runtime.serving.swap import Swap
from tir_schedules.step_layout import PAGE

PROTECTED = 3  # preemptions, after which a sequence gives way only if all have had as many


class Residency:
    """Each sequence that has not ended is in one list by its state; only those under way have pages."""

    def __init__(self, pool: PagePool, tree: PrefixTree, limits: Limits, totals: Totals) -> None:
        self.pool, self.tree, self.limits, self.totals = pool, tree, limits, totals
        self.waiting = waiting.WaitingQueue()
        self.prefilling: list[Sequence] = []  # both by `Sequence.order`
        self.running: list[Sequence] = []
        self.forking = 0  # places that the step being planned gives to those of `alike`
        self.on_preemption: Callable[[Sequence], None] = lambda sequence: None
        self.swap: Swap | None = None
        self._blocked: tuple[Sequence, int] | None = None  # who did not fit, and the pool's `frees` then

    @property
    def places(self) -> int:
        """How many more sequences may be under way."""
        return self.limits.sequences - len(self.running) - len(self.prefilling) - self.forking

    def move(self, sequence: Sequence, state: State) -> None:
        """To the list of this state."""
        if sequence.state is state:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is not State.ENDED:
            waiting.remove(self.running if sequence.state is State.RUNNING else self.prefilling, sequence)
        sequence.state = state
        if state is State.WAITING:
            self.waiting.add(sequence)
        elif state is not State.ENDED:
            insort(self.running if state is State.RUNNING else self.prefilling, sequence, key=waiting.order)

    def give_way(self, sequence: Sequence) -> bool:
        """Somebody is preempted, so that `sequence` may go on; False if that is the sequence itself.

        It is the youngest of the lowest class, among those who have not given way too often.
        """
        active = [*self.running, *self.prefilling]
        if active == [sequence] and self.tree.pins:
            self.tree.unpin(next(iter(self.tree.pins)))
            return True
        candidates = [one for one in active if one.preemptions < PROTECTED] or active
        victim = max(candidates, key=waiting.order)
        self.preempt(victim)
        return victim is not sequence

    def give_way_below(self, priority: int) -> bool:
        """Preempt the youngest of the lowest class, if that is below this priority; False if nobody is."""
        active = (*self.running, *self.prefilling)
        candidates = [one for one in active if one.request.priority < priority and one.preemptions < PROTECTED]
        if not candidates:
            return False
        self.preempt(max(candidates, key=waiting.order))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue. Its full pages are in the tree, so that coming back costs what is evicted meanwhile."""
        self.on_preemption(sequence)
        if self.swap is not None:
            self.swap.watch(sequence)
        self.pool.release(sequence)
        sequence.draft = []
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self.move(sequence, State.WAITING)

    def end(self, sequence: Sequence) -> None:
        """The sequence has no pages and is in no list."""
        if self.swap is not None:
            self.swap.forget(sequence)
        if sequence.request.keep and sequence.shared:
            self.tree.pin(sequence)
        self.pool.release(sequence)
        self.move(sequence, State.ENDED)

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether another sequence is about to compute pages that this waiting one needs and does not find."""
        first = sequence.behind
        if first is not None and first.state is State.PREFILLING and first.computed < sequence.behind_tokens:
            return True
        sequence.behind = None
        return False

    def admit(self, sequence: Sequence) -> bool:
        """A waiting sequence gets under way with the pages that are found; False if it has to wait.

        It waits behind one that computes a prefix of its own, and where its prompt would take pages that those under
        way were promised. Lower classes give way to it.
        """
        if self._is_behind(sequence) or self._blocked == (sequence, self.pool.frees):
            return False
        self.tree.take(sequence)
        admitted = False
        try:
            self._look_behind(sequence)
            admitted = sequence.behind is None and self._make_room(sequence)
        finally:
            if not admitted:
                self.tree.give_back(sequence)
        if admitted:
            self._count_cached(sequence)
            self.move(sequence, State.PREFILLING)
            if self.swap is not None:
                self.swap.restore(sequence, self.tree.reserve)
        elif sequence.behind is None:
            self._blocked = (sequence, self.pool.frees)
        return admitted

    def _make_room(self, sequence: Sequence) -> bool:
        """A place and pages for it; False if nobody who has them gives way."""
        while self.places <= 0 or not self._fits(sequence):
            if self.give_way_below(sequence.request.priority):
                continue
            if self.running or self.prefilling or not self.tree.pins:
                return False
            self.tree.unpin(next(iter(self.tree.pins)))
        return True

    def _count_cached(self, sequence: Sequence) -> None:
        if sequence.cached is None:
            sequence.cached = sequence.computed
            self.totals.prefix_queries += len(sequence.request.tokens)
            self.totals.prefix_hits += sequence.cached

    def alike(self, first: Sequence) -> list[Sequence]:
        """Who waits with the same prompt and will start where this one's ends, as far as there are places and pages."""
        if first.answer:
            return []
        pages = min(self.pool.available(group) for group in range(len(self.pool.units)))
        room = min(self.places, pages - len(self.running) - len(self.prefilling) - self.forking)
        found: list[Sequence] = []
        for one in self.waiting:
            exact = first.request.deterministic or not one.request.deterministic
            same = not one.answer and one.tokens == first.tokens and self.tree.family(one) == self.tree.family(first)
            if same and exact and len(found) < room:
                one.behind, one.behind_tokens = first, len(first.tokens)
                found.append(one)
        self.forking += len(found)
        return found

    def fork(self, first: Sequence, sequence: Sequence) -> bool:
        """The sequence starts with the pages of `first`, whose prompt it has; False if it does not wait any more."""
        if sequence.state is not State.WAITING:
            return False
        if self.swap is not None:
            self.swap.forget(sequence)
        self.pool.fork(first, sequence)
        self._count_cached(sequence)
        self.move(sequence, State.PREFILLING)
        return True

    def _look_behind(self, sequence: Sequence) -> None:
        """Set `behind` where a prompt under way has the next page of this one, and has yet to compute it."""
        at, last = sequence.computed // PAGE, min(sequence.few_from, len(sequence.tokens) - 1) // PAGE
        tokens = sequence.tokens
        for first in self.prefilling:
            end = min(last, first.few_from // PAGE)
            if first.computed // PAGE > at or end <= at or self.tree.family(first) != self.tree.family(sequence):
                continue
            if first.tokens[: (at + 1) * PAGE] != tokens[: (at + 1) * PAGE]:
                continue
            while at < end and first.tokens[at * PAGE : (at + 1) * PAGE] == tokens[at * PAGE : (at + 1) * PAGE]:
                at += 1
            sequence.behind, sequence.behind_tokens = first, at * PAGE
            return

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are pages and slots for all its tokens beside what prompts under way and answers will need."""
        for group in range(len(self.pool.units)):
            promised = sum(self._to_come(group, other) for other in self.prefilling) + len(self.running)
            if self._to_come(group, sequence) + promised > self.pool.available(group):
                return False
        return True

    def _to_come(self, group: int, sequence: Sequence) -> int:
        """Pages, or slots, that a sequence needs beyond those it has, to draw its next token."""
        if group == len(self.pool.groups):  # one that a step reads, and one that it writes
            return 2 - len({sequence.slot, sequence.next_slot} - {-1})
        most = self.pool.groups[group].most(len(sequence.tokens) + 1, self.limits.prefill_chunk)
        return max(0, most - len(sequence.tables[group]) + sequence.kept_from[group])
