"""The page pool and the prefix tree, case by case; `test_page_traces.py` tries them at random."""

from __future__ import annotations

import pytest

from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tir_schedules.step_layout import PAGE


def sequence(pool: PagePool, tokens: int | list[int], **rest: object) -> Sequence:
    words = list(range(tokens)) if isinstance(tokens, int) else tokens
    return pool.sequence(0, ScheduledRequest(tuple(words), 100, **rest))  # type: ignore[arg-type]


def computed(pool: PagePool, tree: PrefixTree, tokens: int | list[int], **rest: object) -> Sequence:
    """A sequence with all of its tokens computed."""
    one = sequence(pool, tokens, **rest)
    tree.take(one)
    assert pool.reserve(one, one.left)
    one.computed = len(one.tokens)
    tree.add(one)
    pool.slide(one)
    return one


def made(*groups: PageGroup) -> tuple[PagePool, PrefixTree]:
    pool = PagePool(groups)
    return pool, PrefixTree(pool)


def test_a_hit_ends_on_a_page_before_the_last_token() -> None:
    pool, tree = made(PageGroup(20))
    computed(pool, tree, 48)
    assert [tree.take(sequence(pool, n)) for n in (16, 17, 47, 48, 49, 60)] == [0, 16, 32, 32, 48, 48]


def test_namespaces_do_not_meet() -> None:
    pool, tree = made(PageGroup(20))
    computed(pool, tree, 32, namespace="a")
    assert tree.take(sequence(pool, 40, namespace="b")) == 0
    assert tree.take(sequence(pool, 40, namespace="a")) == 32


def test_frequencies_of_rope_do_not_meet() -> None:
    pool = PagePool([PageGroup(40)])
    tree = PrefixTree(pool, recompute_above=64)
    computed(pool, tree, 64)
    assert tree.take(sequence(pool, 65)) == 0 and tree.take(sequence(pool, 64)) == 48
    tree = PrefixTree(PagePool([PageGroup(40)]), rope_above=64)
    computed(tree.pool, tree, 70)
    found = [tree.take(sequence(tree.pool, n)) for n in (60, 64, 69, 70, 71)]
    assert found == [0, 0, 0, 64, 0]


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool, tree = made(PageGroup(6))
    first, second = computed(pool, tree, 32), computed(pool, tree, [9] * 32)
    pool.release(first)
    pool.release(second)
    pool.release(computed(pool, tree, 33))  # uses the first again
    assert pool.counts()[0] == (2, 4, 0)
    assert tree.evict([1])
    assert tree.take(sequence(pool, [9] * 33)) == 16  # its leaf went
    assert tree.take(sequence(pool, 33)) == 32


def test_two_who_compute_the_same_go_on_with_one() -> None:
    pool, tree = made(PageGroup(6))
    one, other = sequence(pool, 40), sequence(pool, 40)
    for each in (one, other):
        assert pool.reserve(each, 40)
        each.computed = 40
    assert pool.counts()[0].used == 6
    tree.add(one)
    tree.add(other)
    assert pool.counts()[0].used == 4
    assert one.tables[0][:2] == other.tables[0][:2] and one.tables[0][2] != other.tables[0][2]


def test_who_minds_the_arithmetic_finds_prompts_only() -> None:
    pool, tree = made(PageGroup(20))
    answered = sequence(pool, 20)
    answered.tokens += range(20, 50)  # an answer, of decode rows
    assert pool.reserve(answered, 50)
    answered.computed = 50
    tree.add(answered)
    assert tree.take(sequence(pool, 50)) == 48
    minds = sequence(pool, 50, deterministic=True)
    assert tree.take(minds) == 16
    assert pool.reserve(minds, 34)
    minds.computed = 50
    tree.add(minds)
    assert tree.take(sequence(pool, 50, deterministic=True)) == 48
    again = sequence(pool, 20, deterministic=True)  # preempted, and back: its own answer has the right arithmetic
    again.tokens += range(20, 50)
    assert tree.take(again) == 48
    assert again.tables[0] == answered.tables[0][:3] != minds.tables[0][:3]


def test_a_window_gives_pages_back_and_needs_only_the_last() -> None:
    pool, tree = made(PageGroup(20), PageGroup(20, 40))
    one = computed(pool, tree, 160)
    assert [counts.used for counts in pool.counts()] == [10, 3]
    assert list(one.tables[1][:7]) == [-1] * 7 and one.kept_from == [0, 7]
    window = list(one.tables[1])
    pool.release(one)
    other = sequence(pool, 161)
    assert tree.take(other) == 160
    assert list(other.tables[1]) == window
    pool.release(other)
    assert tree.evict([0, pool.counts()[1].idle - 3])  # those that nobody needs were dropped first
    assert tree.take(again := sequence(pool, 161)) == 160
    pool.release(again)
    assert tree.take(sequence(pool, 150)) == 0  # its last window went
    assert len(pool.pages[0].idle) == 10


@pytest.mark.parametrize("window", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_window_keeps_what_the_next_token_sees(window: int) -> None:
    """And the last full page."""
    pool, tree = made(PageGroup(40, window))
    one = sequence(pool, 300)
    for length in range(1, 200):
        assert pool.reserve(one, 1)
        one.computed = length
        tree.add(one)
        pool.slide(one)
        pool.invariants([one])
        tree.invariants()
        seen = max(0, length - window + 1) // PAGE
        assert seen - 2 <= one.kept_from[0] <= min(seen, max(0, length // PAGE - 1))
        assert pool.counts()[0].used <= pool.groups[0].most(length, 1)


def test_what_is_discarded_is_not_found_again() -> None:
    for groups in ([PageGroup(20)], [PageGroup(20), PageGroup(20, 40)], [PageGroup(20, 40)]):
        pool, tree = made(*groups)
        shared = computed(pool, tree, 32)
        wrong = computed(pool, tree, 96)
        tree.discard(wrong)
        tree.invariants()
        pool.release(wrong)
        pool.invariants([shared])
        assert pool.counts()[0] == (18, 0, 2)
        assert tree.take(again := sequence(pool, 96)) == 32
        pool.release(again)
        pool.release(shared)


def test_what_follows_the_discarded_goes_too_unless_it_is_used() -> None:
    pool, tree = made(PageGroup(20))
    longer, wrong = computed(pool, tree, 128), computed(pool, tree, 96)
    tree.discard(wrong)
    assert tree.take(again := sequence(pool, 128)) == 112
    pool.release(again)
    pool.release(longer)
    pool.release(wrong)
    wrong = computed(pool, tree, 96)
    tree.discard(wrong)
    tree.invariants()
    assert tree.take(sequence(pool, 128)) == 0 and pool.counts()[0].used == 6


def test_a_pinned_prefix_stays() -> None:
    pool, tree = made(PageGroup(6))
    one = computed(pool, tree, 40)
    pin = tree.pin(one)
    pool.release(one)
    assert pool.counts()[0] == (4, 0, 2) and not tree.evict([1])
    tree.unpin(pin)
    assert pool.counts()[0] == (4, 2, 0) and tree.evict([2])


def test_a_fork_copies_the_page_that_is_not_full_when_one_of_them_writes() -> None:
    pool, tree = made(PageGroup(6))
    parent = computed(pool, tree, 40)
    child = sequence(pool, 40)
    pool.fork(parent, child)
    assert child.tables == parent.tables and pool.counts()[0].used == 3
    assert pool.reserve(child, 1) and pool.reserve(parent, 1)
    assert pool.take_copies() == [(parent.tables[0][2], child.tables[0][2], 0)]
    assert pool.counts()[0].used == 4 and pool.take_copies() == []


def test_a_copy_that_nobody_needs_is_not_made() -> None:
    pool, tree = made(PageGroup(6))
    parent = computed(pool, tree, 40)
    child = sequence(pool, 40)
    pool.fork(parent, child)
    assert pool.reserve(child, 1)
    pool.release(child)
    assert pool.take_copies() == [] and pool.counts()[0].used == 3
