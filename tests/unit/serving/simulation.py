"""A device of pages without numbers, and a virtual clock: what a step reads and writes, in bookkeeping only.

Each place of a page keeps a digest of a token and all before it, with the arithmetic of each. A row may only continue from
what its tables lead to, so a page that is shared, copied, given away or overwritten wrongly shows in the digests. A drawn
token follows from the digest, so that an answer can be compared with the same request's alone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from mlcpipe.runtime.serving.batch import StepBuffer, decode_spans, prefill_spans
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.page_pool import PageCopy, PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.scheduler import Scheduler
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, Sequence, State
from mlcpipe.runtime.serving.step import NOT_DRAWN, Event, Step
from tir_schedules.step_layout import (
    KEYS,
    PAGE,
    PLACE,
    POSITION,
    ROW_BEGIN,
    ROWS,
    SEQUENCES,
    SLOT_OF_ROW,
    SLOT_READ,
    SLOT_WRITE,
    TABLE_BEGIN,
    TABLES,
)

VOCAB = 1000
COSTS = (20e-3, 2e-3, 20e-3, 1e-3, 1e-6, 0.2e-6)


def digest(before: int, token: int, decode: bool) -> int:
    """Of a token and all before it, 64 bits (Knuth's generator of that size)."""
    return ((before ^ (2 * token + decode)) * 6364136223846793005 + 1442695040888963407) % 2**64


def drawn(of: int, vocab: int = VOCAB) -> int:
    """The token that follows."""
    return (of >> 33) % vocab


class Memory:
    """The places of all pages of each group, and the slots, with the digest of the last token of a state."""

    def __init__(self, groups: Iterable[PageGroup], slots: int) -> None:
        self.groups = tuple(groups)
        self.slots: list[int | None] = [None] * slots
        self.places: list[list[int | None]] = [[None] * (PAGE * group.pages) for group in self.groups]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """All at once, as a kernel would: no target may be a source."""
        copies = list(copies)
        targets = [(copy.group, copy.target) for copy in copies]
        assert len(set(targets)) == len(targets) and not set(targets) & {(copy.group, copy.source) for copy in copies}
        for source, target, group in copies:
            places = self.places[group]
            places[target * PAGE : (target + 1) * PAGE] = places[source * PAGE : (source + 1) * PAGE]

    def forward(self, step: list[int], tokens: list[int], roots: list[int], decode: bool) -> list[int]:
        """Store each row after what its tables lead to -> its digest. `roots`: of each sequence, before any token."""
        digests = []
        reads, writes = (
            step[step[at] : step[at] + step[SEQUENCES] * bool(self.slots)] for at in (SLOT_READ, SLOT_WRITE)
        )
        of_rows = step[step[SLOT_OF_ROW] :] if step[SLOT_OF_ROW] else []
        extra = [slot for slot in of_rows[: step[ROWS]] if slot >= 0]
        assert len({*writes, *extra}) == len(writes + extra) and all(0 <= slot < len(self.slots) for slot in writes)
        assert not {*extra} & {*reads}
        assert all(slot not in reads or reads.index(slot) == s == len(reads) - 1 - reads[::-1].index(slot)
                   for s, slot in enumerate(writes)), "no sequence writes what another one reads"  # fmt: skip
        for s in range(step[SEQUENCES]):
            first = step[step[POSITION] + step[step[ROW_BEGIN] + s]]
            assert not reads or (reads[s] < 0) == (first == 0)
            state = self.slots[reads[s]] if reads and first else roots[s]
            for row in range(step[step[ROW_BEGIN] + s], step[step[ROW_BEGIN] + s + 1]):
                position = step[step[POSITION] + row]
                assert position < step[step[KEYS] + s]
                tables = [step[TABLES + group] + step[step[TABLE_BEGIN] + s] for group in range(len(self.groups))]
                seen = [self._read(group, step, tables[group], position) for group in range(len(self.groups))]
                shortest = min(seen, key=len)
                assert None not in seen[0] and all(one[len(one) - len(shortest) :] == shortest for one in seen)
                made = digest(seen[0][-1] if position else roots[s], tokens[row], decode)
                for group, places in enumerate(self.places):
                    places[step[tables[group] + position // PAGE] * PAGE + position % PAGE] = made
                assert step[step[PLACE] + row] == step[tables[0] + position // PAGE] * PAGE + position % PAGE
                assert not self.slots or state == (seen[0][-1] if position and seen[0] else roots[s])
                state = made
                if of_rows and of_rows[row] >= 0:
                    self.slots[of_rows[row]] = state
                digests.append(made)
            if writes:
                self.slots[writes[s]] = state
        return digests

    def _read(self, group: int, step: list[int], table: int, position: int) -> list[int | None]:
        """What a query at this position sees of those before it."""
        window = self.groups[group].window
        first = max(0, position - window + 1) if window else 0
        return [self.places[group][step[table + at // PAGE] * PAGE + at % PAGE] for at in range(first, position)]


@dataclass
class Simulation:
    """A scheduler, its simulated device and clock. A step takes what `costs` say, times what `slower` says each time."""

    groups: tuple[PageGroup, ...] = (PageGroup(256),)
    limits: Limits = Limits(context=2048)
    cost: CostModel = field(default_factory=lambda: CostModel(COSTS, learn=False))
    costs: tuple[float, ...] = COSTS
    slower: Callable[[], float] = lambda: 1.0
    checked: bool = True
    late: Callable[[], bool] = lambda: False  # whether a sequence draws nothing in a step
    now: float = 0.0
    recompute_above: int | None = None
    slots: int = 0
    redraws: bool = True  # requests say that rows may be computed again
    vocab: int = VOCAB

    def __post_init__(self) -> None:
        self.limits = replace(self.limits, recompute_above=self.recompute_above)
        self.pool = PagePool(self.groups, self.slots)
        self.tree = PrefixTree(self.pool, self.recompute_above)
        self.scheduler = Scheduler(self.pool, self.tree, self.cost, self.limits)
        self.memory = Memory(self.groups, self.slots)
        self.sequences: list[Sequence] = []
        self.times: dict[Sequence, list[float]] = {}  # when each token came
        self.ends: dict[Sequence, tuple[Finish, float]] = {}
        self.steps: list[Step] = []
        self._truth = CostModel(self.costs, learn=False)
        self._buffer = StepBuffer()

    def submit(self, tokens: Iterable[int], max_tokens: int = 8, **rest: object) -> Sequence:
        """A request that arrives now."""
        rest = {"redraws": self.redraws, **rest}
        request = ScheduledRequest(tuple(tokens), max_tokens, arrival=self.now, **rest)  # type: ignore[arg-type]
        sequence = self.scheduler.submit(request)
        self.sequences.append(sequence)
        self.times[sequence] = []
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End it."""
        event = self.scheduler.cancel(sequence)
        self.deliver([event] if event else [])

    def step(self) -> Step | None:
        """One turn of the engine's loop."""
        self.deliver(self.scheduler.expire(self.now))
        step = self.scheduler.plan(self.now)
        if step is None:
            self.check()
            return None
        tokens = self.compute(step)
        self.now += self._truth.seconds(step.load) * self.slower()
        self.steps.append(step)
        self.deliver(self.scheduler.settle(step, tokens, self.now))
        self.check()
        return step

    def compute(self, step: Step) -> list[int]:
        """The device's part: the tokens that it draws."""
        self.memory.copy(step.copies)
        tokens_drawn: list[int] = []

        def draw(digests: list[int]) -> None:
            late = self.late()
            tokens_drawn.extend(NOT_DRAWN if late else drawn(one, self.vocab) for one in digests)

        if step.decode:
            tokens = [token for rows in step.decode for token in rows.tokens]
            made = self._forward(decode_spans(step.decode), tokens, decode=True)
            for rows in step.decode:
                mine, made = made[: len(rows.tokens)], made[len(rows.tokens) :]
                draw(mine[len(mine) - rows.logits :])
        if step.prefill:
            tokens = [token for rows in step.prefill for token in rows.tokens]
            made = self._forward(prefill_spans(step.prefill), tokens, decode=False)
            for rows in step.prefill:
                mine, made = made[: rows.rows], made[rows.rows :]
                for _ in rows.drawing:
                    draw(mine[-1:])
        return tokens_drawn

    def _forward(self, spans: list, tokens: list[int], decode: bool) -> list[int]:
        limit = self.recompute_above
        for one, begin, rows in spans:
            assert limit is None or one.decode_from > limit or begin + rows <= limit  # else of two kinds of frequencies
        roots = [zlib.crc32(repr(self.tree.family(span.sequence)).encode()) for span in spans]
        return self.memory.forward(self._buffer.fill(spans).tolist(), tokens, roots, decode)

    def deliver(self, events: list[Event]) -> None:
        """Note when tokens came."""
        for sequence, tokens, finish in events:
            assert sequence not in self.ends
            self.times[sequence] += [self.now] * len(tokens)
            if finish is not None:
                self.ends[sequence] = (finish, self.now)

    def check(self) -> None:
        """The accounts of pages, unless `checked` is off."""
        if self.checked:
            pins = [page for pin in self.tree.pins for page in pin.pages]
            parked = self.scheduler.admission.parked
            self.pool.invariants([*(one for one in self.sequences if one not in parked), *parked], pins)
            self.tree.invariants()
            self.sequences = [one for one in self.sequences if one.state is not State.ENDED]

    def run(self, most: int = 100_000) -> None:
        """Until nobody has anything to do."""
        for _ in range(most):
            if self.step() is None and not self.scheduler.held:
                assert not self.scheduler.has_work
                break
        else:
            raise AssertionError("it does not end")


def alone(
    request: ScheduledRequest, groups: tuple[PageGroup, ...], recompute_above: int | None = None, slots: int = 0
) -> list[int]:
    """The tokens of a request that has an empty device for itself."""
    big = tuple(replace(group, pages=512) for group in groups)
    simulation = Simulation(big, Limits(4096), recompute_above=recompute_above, checked=False, slots=slots)
    sequence = simulation.scheduler.submit(replace(request, arrival=0.0, deadline_s=None))
    simulation.times[sequence] = []
    simulation.run()
    return sequence.tokens


def words(rng: random.Random, count: int, vocab: int = VOCAB) -> list[int]:
    """So many tokens."""
    return [rng.randrange(vocab) for _ in range(count)]


def first_token_s(simulation: Simulation, sequence: Sequence) -> float:
    """How long a request waited for its first token."""
    return simulation.times[sequence][0] - sequence.request.arrival


def until_running(simulation: Simulation, *sequences: Sequence) -> None:
    """Step until each of them answers."""
    for _ in range(200):
        if all(sequence.state is State.RUNNING for sequence in sequences):
            break
        simulation.step()
    assert all(sequence.state is State.RUNNING for sequence in sequences)
