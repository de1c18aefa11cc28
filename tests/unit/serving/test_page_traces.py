"""Random traces of the page pool and the prefix tree, beside a model in which every sequence has its tokens copied."""

from __future__ import annotations

import random

import pytest

from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import Pin, PrefixTree
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tir_schedules.step_layout import PAGE

FULL = (PageGroup(24),)
BOTH = (PageGroup(24), PageGroup(20, 24))
SLIDING = (PageGroup(20, 40),)
NARROW = (PageGroup(24), PageGroup(20, 5))
GROUPS = pytest.mark.parametrize("groups", [FULL, BOTH, SLIDING, NARROW], ids=["full", "both", "sliding", "narrow"])


class Trace:
    """Sequences that grow, fork, shrink and end at random; pages with contents, and what each sequence should find."""

    def __init__(self, groups: tuple[PageGroup, ...], seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = PagePool(groups)
        self.tree = PrefixTree(self.pool)
        self.pages = [[[None] * PAGE for _ in range(group.pages)] for group in groups]
        self.copied: dict[Sequence, list[object]] = {}  # sequence -> what its places have to hold
        self.pins: list[Pin] = []
        self.prompts = [[self.rng.randrange(3) for _ in range(90)] for _ in range(4)]
        self.done: dict[str, int] = {}
        self.ids = 0

    def step(self) -> None:
        """One random operation, its check, and the invariants."""
        actions = [self.begin, self.extend, self.extend, self.extend, self.fork, self.truncate, self.end]
        actions += [self.evict, self.pin, self.unpin]
        action = self.rng.choice(actions)
        self.done[action.__name__] = self.done.get(action.__name__, 0) + bool(action())
        pins = [page for pin in self.pins for page in pin.pages]
        self.pool.invariants(self.copied, pins)
        self.tree.invariants()

    def begin(self) -> bool:
        if len(self.copied) == 6:
            return False
        prompt = self.rng.choice(self.prompts)[: self.rng.randint(1, 90)]
        namespace, deterministic = self.rng.choice("ab"), self.rng.random() < 0.5
        request = ScheduledRequest(tuple(prompt), 1, namespace=namespace, deterministic=deterministic)
        self.ids += 1
        sequence = self.pool.sequence(self.ids, request)
        taken = self.tree.take(sequence)
        assert taken % PAGE == 0 and taken < len(prompt)
        chain, node = [], sequence.node
        while node is not None and node.parent is not None and node.parent.parent is not None:
            chain.append(node.decode_mask)
            node = node.parent
        decode = [bool(mask >> i & 1) for mask in reversed(chain) for i in range(PAGE)]
        assert len(decode) == taken and not (deterministic and any(decode))
        self.copied[sequence] = self.contents(sequence, decode)
        self.check(sequence)
        if self.rng.random() < 0.2:
            self.tree.give_back(sequence)
            del self.copied[sequence]
        return taken > 0

    @staticmethod
    def contents(sequence: Sequence, decode: list[bool]) -> list[object]:
        """A place holds the namespace, all tokens up to its own, and their arithmetic."""
        made: list[object] = []
        for token, kind in zip(sequence.tokens, decode):
            made.append(hash((made[-1] if made else sequence.request.namespace, token, kind)))
        return made

    def extend(self) -> bool:
        """Compute known tokens, or one that is drawn."""
        if not self.copied:
            return False
        sequence, copied = self.rng.choice(list(self.copied.items()))
        if not sequence.left:
            sequence.tokens.append(self.rng.randrange(3))
        rows = self.rng.randint(1, min(sequence.left, 40))
        before = [[list(table), list(pages.free)] for table, pages in zip(sequence.tables, self.pool.pages)]
        if not self.pool.reserve(sequence, rows):
            missing = self.pool.missing(sequence, rows)
            assert before == [[list(t), list(p.free)] for t, p in zip(sequence.tables, self.pool.pages)]
            assert max(missing) > 0
            if not self.tree.evict(missing):
                assert any(max(0, n) > len(p.idle) for n, p in zip(missing, self.pool.pages))
                return False
            assert self.pool.reserve(sequence, rows)
        for source, target, group in self.pool.take_copies():
            self.pages[group][target] = list(self.pages[group][source])
        for at in range(sequence.computed, sequence.computed + rows):
            decode = at >= sequence.decode_from
            copied.append(hash((copied[-1] if copied else sequence.request.namespace, sequence.tokens[at], decode)))
            for pages, table in zip(self.pages, sequence.tables):
                pages[table[at // PAGE]][at % PAGE] = copied[at]
        sequence.computed += rows
        self.tree.add(sequence)
        self.pool.slide(sequence)
        for each in self.copied:
            self.check(each)
        return True

    def check(self, sequence: Sequence) -> None:
        """A query after the computed tokens finds what the copies say."""
        copied = self.copied[sequence]
        assert len(copied) == sequence.computed
        for pages, table, about in zip(self.pages, sequence.tables, self.pool.groups):
            first = max(0, sequence.computed + 1 - about.window) if about.window else 0
            found = [pages[table[at // PAGE]][at % PAGE] for at in range(first, sequence.computed)]
            assert found == copied[first:]
            assert all(table[at // PAGE] >= 0 for at in range(first, sequence.computed))

    def fork(self) -> bool:
        if not self.copied or len(self.copied) == 6:
            return False
        parent = self.rng.choice(list(self.copied))
        self.ids += 1
        child = self.pool.sequence(self.ids, parent.request)
        child.tokens = parent.tokens[: parent.computed] or list(parent.tokens)
        child.decode_from = parent.decode_from
        self.pool.fork(parent, child)
        self.copied[child] = list(self.copied[parent])
        self.check(child)
        return parent.computed % PAGE > 0

    def truncate(self) -> bool:
        """Rejected drafts: rows after the computed ones go."""
        if not self.copied:
            return False
        sequence = self.rng.choice(list(self.copied))
        if not self.pool.reserve(sequence, self.rng.randint(1, 40)):
            return False
        for source, target, group in self.pool.take_copies():
            self.pages[group][target] = list(self.pages[group][source])
        end = len(sequence.tables[0]) * PAGE
        for pages, table in zip(self.pages, sequence.tables):
            for at in range(sequence.computed, end):
                pages[table[at // PAGE]][at % PAGE] = "rejected"
        self.pool.truncate(sequence, sequence.computed)
        for each in self.copied:
            self.check(each)
        return True

    def end(self) -> bool:
        if not self.copied:
            return False
        sequence = self.rng.choice(list(self.copied))
        del self.copied[sequence]
        self.pool.release(sequence)
        assert not any(sequence.tables)
        return True

    def evict(self) -> bool:
        counts = [self.rng.randint(0, 3) for _ in self.pool.groups]
        free = [len(pages.free) for pages in self.pool.pages]
        done = self.tree.evict([n - len(p.free) + f for n, p, f in zip(counts, self.pool.pages, free)])
        grown = [len(pages.free) - before for pages, before in zip(self.pool.pages, free)]
        assert all(n >= count for n, count in zip(grown, counts)) if done else not any(grown)
        return done and any(counts)

    def pin(self) -> bool:
        if not self.copied or len(self.pins) == 2:
            return False
        self.pins.append(self.tree.pin(self.rng.choice(list(self.copied))))
        return bool(self.pins[-1].pages)

    def unpin(self) -> bool:
        if not self.pins:
            return False
        self.tree.unpin(self.pins.pop(0))
        return True


def trace(groups: tuple[PageGroup, ...], seed: int, steps: int) -> Trace:
    made = Trace(groups, seed)
    for at in range(steps):
        try:
            made.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, operation {at}") from error
    for sequence in list(made.copied):
        made.pool.release(sequence)
    for pin in made.pins:
        made.tree.unpin(pin)
    assert all(counts.used == 0 for counts in made.pool.counts())
    made.tree.evict([counts.idle for counts in made.pool.counts()])
    made.tree.invariants()
    assert [counts.free for counts in made.pool.counts()] == [group.pages for group in groups]
    return made


@GROUPS
def test_random_traces(groups: tuple[PageGroup, ...]) -> None:
    done = trace(groups, seed=1, steps=800).done
    assert all(count > 5 for count in done.values()), done  # each operation was tried for real


@pytest.mark.full
@GROUPS
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(1, 3))])
def test_long_random_traces(groups: tuple[PageGroup, ...], seed: int) -> None:
    trace(groups, 100 + seed, steps=9_000)
