"""Admission and preemption: which sequences hold pages, which wait, which are preempted."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from mlcpipe.runtime.serving import waiting
from mlcpipe.runtime.serving.cache_miss import cache_miss
from mlcpipe.runtime.serving.limits import Limits, Totals
from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import Finish, Sequence, State
from mlcpipe.runtime.serving.swap import Swap
from tir_schedules.step_layout import PAGE

MOST_PARKED = 8
PROTECTED = 3  # preemptions, after which a sequence is preempted again only if all others had as many


class Admission:
    """Lists of the sequences by state; only prefilling and running ones have pages."""

    def __init__(self, pool: PagePool, tree: PrefixTree, limits: Limits, totals: Totals) -> None:
        self.pool, self.tree, self.limits, self.totals = pool, tree, limits, totals
        self.waiting = waiting.WaitingQueue()
        self.prefilling: list[Sequence] = []  # both by `Sequence.order`
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []  # ended ones that keep their pages, the last one ended last
        self.forking = 0  # places that the step being planned gives to sequences of `same_prompt`
        self.on_preemption: Callable[[Sequence], None] = lambda sequence: None
        self.swap: Swap | None = None
        self._blocked: tuple[Sequence, int] | None = None  # which did not fit, and the pool's `frees` then

    @property
    def places(self) -> int:
        """How many more sequences may be admitted."""
        return self.limits.sequences - len(self.running) - len(self.prefilling) - self.forking

    def move(self, sequence: Sequence, state: State) -> None:
        """Move to the list of this state."""
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

    def preempt_for(self, sequence: Sequence) -> bool:
        """Preempt a sequence, so that `sequence` may continue; False if that is the sequence itself.

        It is the youngest of the lowest class, among those not preempted too often.
        """
        if self.unpark():
            return True
        active = [*self.running, *self.prefilling]
        if active == [sequence] and self.tree.pins:
            self.tree.unpin(next(iter(self.tree.pins)))
            return True
        candidates = [one for one in active if one.preemptions < PROTECTED] or active
        victim = max(candidates, key=waiting.order)
        self.preempt(victim)
        return victim is not sequence

    def preempt_below(self, priority: int) -> bool:
        """Preempt the youngest of the lowest class, if that is below this priority; False if there is none."""
        active = (*self.running, *self.prefilling)
        candidates = [one for one in active if one.request.priority < priority and one.preemptions < PROTECTED]
        if not candidates:
            return False
        self.preempt(max(candidates, key=waiting.order))
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Put back in the queue. Its full pages are in the tree, so only those evicted meanwhile are computed again."""
        self.on_preemption(sequence)
        if self.swap is not None:
            self.swap.watch(sequence)
        self.pool.release(sequence)
        sequence.draft = []
        sequence.preemptions += 1
        self.totals.preemptions += 1
        self.move(sequence, State.WAITING)

    def end(self, sequence: Sequence) -> None:
        """Release the pages of a sequence and take it off its list."""
        if self.swap is not None:
            self.swap.forget(sequence)
        if sequence.request.keep and sequence.shared:
            self.tree.pin(sequence)
        if sequence.request.parks and sequence.computed and sequence.finish is not Finish.ERROR:
            self.park(sequence)
        else:
            self.pool.release(sequence)
        self.move(sequence, State.ENDED)

    def park(self, sequence: Sequence) -> None:
        """Keep the computed pages of a sequence for the next turn, until others need them."""
        self.pool.truncate(sequence, sequence.computed)
        if self.pool.slots is not None:
            self.pool.repeat(sequence, 0)
        if len(self.parked) == MOST_PARKED:
            self.unpark()
        self.parked.append(sequence)
        self._blocked = None  # its pages may be taken

    def unpark(self, but: Sequence | None = None) -> bool:
        """Release the pages of the sequence that was parked first, except this one; False if there is none."""
        first = next((one for one in self.parked if one is not but), None)
        if first is not None:
            self.parked.remove(first)
            self.pool.release(first)
        return first is not None

    def start(self, sequence: Sequence) -> None:
        """Start a sequence with the pages of the tree, or of a parked sequence that has more of its tokens."""
        self.tree.take(sequence)
        found = ((self.tree.shared(one, sequence), at) for at, one in enumerate(self.parked))
        shared, at = max(found, default=(0, 0))
        if shared > sequence.computed:
            parked = self.parked.pop(at)
            self.pool.release(sequence)
            page, tokens = divmod(shared, PAGE)
            computed, mask = parked.computed, parked.decode_mask(page) & ~(-1 << tokens)
            self.tree.go_back(parked, shared)
            self.pool.fork(parked, sequence)
            self.pool.release(parked)
            sequence.taken_page, sequence.taken_mask, sequence.taken_from = page, mask, computed

    def _awaits_leader(self, sequence: Sequence) -> bool:
        """Whether another sequence is about to compute pages that this waiting one needs and that the tree lacks."""
        first = sequence.leader
        if first is not None and first.state is State.PREFILLING and first.computed < sequence.leader_tokens:
            return True
        sequence.leader = None
        return False

    def admit(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence with the pages that are found; False if it has to wait.

        It waits for a leader that computes a prefix of it, and while its prompt would take pages promised to admitted
        sequences. Lower classes are preempted for it.
        """
        if self._awaits_leader(sequence) or self._blocked == (sequence, self.pool.frees):
            return False
        self.start(sequence)
        admitted = False
        try:
            self._find_leader(sequence)
            admitted = sequence.leader is None and self._make_room(sequence)
        finally:
            if not admitted:
                self.tree.give_back(sequence)
        if admitted:
            self._count_cached(sequence)
            self.move(sequence, State.PREFILLING)
            if self.swap is not None:
                self.swap.restore(sequence, self.tree.reserve)
        elif sequence.leader is None:
            self._blocked = (sequence, self.pool.frees)
        return admitted

    def _make_room(self, sequence: Sequence) -> bool:
        """Make a place and pages free for it; False if no sequence may be preempted for that."""
        while self.places <= 0 or not self._fits(sequence):
            if self.unpark() or self.preempt_below(sequence.request.priority):
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
            self.totals.prefix_lost += self.tree.lost(sequence)
            sequence.miss = cache_miss(self.tree, sequence)
            if sequence.miss is not None:
                self.totals.misses[sequence.miss.reason] += 1

    def same_prompt(self, first: Sequence) -> list[Sequence]:
        """Waiting sequences with the same prompt, to start where this one's ends, while places and pages last."""
        if first.answer:
            return []
        pages = min(self.pool.available(group) for group in range(len(self.pool.units)))
        room = min(self.places, pages - len(self.running) - len(self.prefilling) - self.forking)
        found: list[Sequence] = []
        for one in self.waiting:
            exact = first.request.deterministic or not one.request.deterministic
            same = not one.answer and one.tokens == first.tokens and self.tree.family(one) == self.tree.family(first)
            if same and exact and len(found) < room:
                one.leader, one.leader_tokens = first, len(first.tokens)
                found.append(one)
        self.forking += len(found)
        return found

    def fork(self, first: Sequence, sequence: Sequence) -> bool:
        """Start the sequence with the pages of `first`, whose prompt it has; False if it no longer waits."""
        if sequence.state is not State.WAITING:
            return False
        if self.swap is not None:
            self.swap.forget(sequence)
        self.pool.fork(first, sequence)
        self._count_cached(sequence)
        self.move(sequence, State.PREFILLING)
        return True

    def _find_leader(self, sequence: Sequence) -> None:
        """Set `leader` where a prefilling sequence has the next page of this one, and has yet to compute it."""
        if sequence.request.denoising is not None and not sequence.request.denoising.keeps:
            return
        at, last = sequence.computed // PAGE, min(sequence.decode_from, len(sequence.tokens) - 1) // PAGE
        tokens = sequence.tokens
        for first in self.prefilling:
            end = min(last, first.decode_from // PAGE)
            if first.computed // PAGE > at or end <= at or self.tree.family(first) != self.tree.family(sequence):
                continue
            if first.tokens[: (at + 1) * PAGE] != tokens[: (at + 1) * PAGE]:
                continue
            while at < end and first.tokens[at * PAGE : (at + 1) * PAGE] == tokens[at * PAGE : (at + 1) * PAGE]:
                at += 1
            sequence.leader, sequence.leader_tokens = first, at * PAGE
            return

    def _fits(self, sequence: Sequence) -> bool:
        """Whether pages and slots for all its tokens are left beyond the needs of prompts and answers so far."""
        for group in range(len(self.pool.units)):
            promised = sum(self._units_needed(group, other) for other in self.prefilling) + len(self.running)
            if self._units_needed(group, sequence) + promised > self.pool.available(group):
                return False
        return True

    def _units_needed(self, group: int, sequence: Sequence) -> int:
        """Pages, or slots, that a sequence needs beyond those it has, to sample its next token."""
        if group == len(self.pool.groups):  # one that a step reads, and one that it writes
            return 2 - len({sequence.slot, sequence.next_slot} - {-1})
        how, tokens = sequence.request.denoising, len(sequence.tokens)
        tokens = tokens + 1 if how is None else how.end(tokens)
        most = self.pool.groups[group].most(tokens, self.limits.prefill_chunk)
        return max(0, most - len(sequence.tables[group]) + sequence.kept_from[group])
