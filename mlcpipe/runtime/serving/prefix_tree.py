"""Full pages by what they hold, so that a prompt starts where another one with the same beginning has come to.

A node is a page: its 16 tokens, after those of its ancestors, compared one by one. The root is chosen by the namespace,
and by what RoPE's frequencies depend on beside the position. A node also says which of its tokens were computed with
decode's arithmetic, so that pages which differ in bits are never confused when a request asks for deterministic reuse.

States in slots are what they are after one token: a node may have the slot of those after its last one, a checkpoint,
and a prompt can start only after such a node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple

from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.sequence import Sequence
from tir_schedules.step_layout import PAGE

_NONE = -1
MIN_CHECKPOINT_TOKENS = 64  # between checkpoints that stay: what computing again must cost to be worth a slot


class Node:
    """A full page. `children`: tokens -> few mask (`Sequence.few_mask`) -> node.

    `pages`: by group, and last the slot of a checkpoint; -1 where there is none, or none any more.

    Below the root is a node without pages for each namespace, which has it for tokens.
    """

    __slots__ = ("children", "few_mask", "pages", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Hashable, few_mask: int, pages: list[int]) -> None:
        self.parent, self.tokens, self.few_mask, self.pages = parent, tokens, few_mask, pages
        self.children: dict[Hashable, dict[int, Node]] = {}

    def child(self, tokens: Hashable, few_mask: int) -> Node:
        """Made if there is none."""
        variants = self.children.setdefault(tokens, {})
        if few_mask not in variants:
            variants[few_mask] = Node(self, tokens, few_mask, [_NONE] * len(self.pages))
        return variants[few_mask]


class Checkpoint(NamedTuple):
    """A slot that a sequence left in a node, after so many tokens, and after how many the one before it is."""

    node: Node
    slot: int
    tokens: int
    before: int


class Pin:
    """A prefix that stays; for `PrefixTree.unpin`. `pages`: (group, page) of each use, also of a slot."""

    def __init__(self, pages: list[tuple[int, int]]) -> None:
        self.pages = pages


class PrefixTree:
    """All full pages that sequences have computed, until their memory is needed.

    A sequence uses every page of its path in groups without a window. It drops them from the end, so among the idle
    pages of such a group the least recently used one is always a leaf. Pages of a window are evicted by themselves:
    what is after them may still be found, as long as the last window is there.

    recompute_above  prompts longer than this have other frequencies (longrope)
    rope_above       frequencies of longer prompts depend on the length itself (dynamic)
    """

    def __init__(self, pool: PagePool, recompute_above: int | None = None, rope_above: int | None = None) -> None:
        self.pool = pool
        self.pins: dict[Pin, None] = {}
        # Called with nodes and their pages of the first group, before anybody else writes to these.
        self.on_eviction: Callable[[list[tuple[Node, int]]], None] = lambda evicted: None
        self._recompute_above, self._rope_above = recompute_above, rope_above
        self._root = Node(None, (), 0, [_NONE] * len(pool.units))
        self._owners: list[dict[int, Node]] = [{} for _ in pool.units]  # by group, page -> node; last of the slots
        # Groups whose pages a node loses alone: the others' are needed by all that is below.
        self._sheds = [bool(group.window) for group in pool.groups] + [True] * (pool.slots is not None)

    def match(self, sequence: Sequence) -> list[Node]:
        """Nodes with which the sequence could start: not its last token, which has to be computed to draw the next."""
        found: list[Node] = []
        family = self._root.children.get(self.family(sequence))
        if family is None:
            return found
        node, tokens, exact = family[0], sequence.tokens, sequence.request.deterministic
        for at in range((len(tokens) - 1) // PAGE):
            variants = node.children.get(tuple(tokens[at * PAGE : (at + 1) * PAGE]))
            if variants is None:
                break
            best = variants.get(sequence.few_mask(at))
            if best is None:
                if exact:
                    break
                best = next(iter(variants.values()))
            found.append(best)
            node = best
        return found[: self._usable(found)]

    def _usable(self, nodes: list[Node]) -> int:
        """With how many of these nodes a sequence can start: all that the token after them needs is there."""
        if not any(self._sheds):
            return len(nodes)
        usable, runs = 0, [0] * len(self.pool.groups)  # pages in a row that are there
        for count, node in enumerate(nodes, 1):
            runs = [run + 1 if page != _NONE else 0 for run, page in zip(runs, node.pages)]
            there = all(run >= count - about.kept_from(count * PAGE) for run, about in zip(runs, self.pool.groups))
            if there and (self.pool.slots is None or node.pages[-1] != _NONE):
                usable = count
        return usable

    def take(self, sequence: Sequence) -> int:
        """The sequence, which has no pages, starts with those that are found -> how many tokens."""
        nodes = self.match(sequence)
        for group, page, at in self._pages_of(nodes):
            self.pool.units[group].use(page)
            if group == len(sequence.tables):
                sequence.slot = page
                continue
            table = sequence.tables[group]
            table.extend([_NONE] * (at - len(table)))
            table.append(page)
        sequence.kept_from = [about.kept_from(len(nodes) * PAGE) for about in self.pool.groups]
        sequence.computed = len(nodes) * PAGE
        sequence.node, sequence.shared = nodes[-1] if nodes else None, len(nodes)
        return sequence.computed

    def _pages_of(self, nodes: list[Node]) -> Iterator[tuple[int, int, int]]:
        """(group, page, its place in the sequence) of what a sequence that starts with these nodes needs.

        Last the slot, if there are any.
        """
        for group, about in enumerate(self.pool.groups):
            for at in range(about.kept_from(len(nodes) * PAGE), len(nodes)):
                yield group, nodes[at].pages[group], at
        if self.pool.slots is not None and nodes:
            yield len(self.pool.groups), nodes[-1].pages[-1], len(nodes) - 1

    def give_back(self, sequence: Sequence) -> None:
        """Undo `take`."""
        self.pool.release(sequence)

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        """Pages for so many more rows, if need be those of prefixes that nobody uses; False if there are not enough."""
        return self.pool.reserve(sequence, rows) or (
            self.evict(self.pool.missing(sequence, rows)) and self.pool.reserve(sequence, rows)
        )

    def can_go_back(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence has all that follows its first so many tokens: windows and slots have lost some."""
        slid = any(about.kept_from(tokens) < kept for about, kept in zip(self.pool.groups, sequence.kept_from))
        return tokens == sequence.computed or not (slid or self.pool.slots is not None)

    def go_back(self, sequence: Sequence, tokens: int) -> None:
        """The sequence keeps its first so many tokens, to which it `can_go_back`."""
        self.pool.truncate(sequence, tokens)
        while sequence.shared > tokens // PAGE:
            assert sequence.node is not None
            sequence.node, sequence.shared = sequence.node.parent, sequence.shared - 1

    def add(self, sequence: Sequence) -> None:
        """Full pages of the sequence become findable. Where one is known already, the sequence goes on with that one.

        Its numbers are the same: a row's depend on the tokens before it and on their arithmetic alone.
        """
        while sequence.shared < sequence.computed // PAGE:
            at = sequence.shared
            node = sequence.node or self._root.child(self.family(sequence), 0)
            node = node.child(tuple(sequence.tokens[at * PAGE : (at + 1) * PAGE]), sequence.few_mask(at))
            self._share(node, sequence, at)
            sequence.node, sequence.shared = node, at + 1

    def _share(self, node: Node, sequence: Sequence, at: int) -> None:
        """The node and the sequence have one page in each group, the node's if it has one."""
        for group, (pages, table) in enumerate(zip(self.pool.pages, sequence.tables)):
            known, own = node.pages[group], table[at]
            if own == _NONE:
                continue
            if known == _NONE:
                node.pages[group] = own
                self._owners[group][own] = node
                pages.hold(own)
            elif known != own:
                pages.use(known)
                table[at] = known
                self.pool.drop(group, own)

    def checkpoint(self, sequence: Sequence) -> None:
        """Where the sequence is at the end of a page, a prompt may start after it: its slot is the node's from now on.

        Its checkpoint before goes where it is too close to the one before that, so that a long answer leaves few.
        """
        node, slots = sequence.node, self.pool.slots
        if slots is None or node is None or sequence.computed != sequence.shared * PAGE:
            return
        known, own, group = node.pages[-1], sequence.slot, len(self.pool.groups)
        if known == _NONE:
            node.pages[-1] = own
            self._owners[-1][own] = node
            slots.hold(own)
        elif known != own:
            slots.use(known)
            sequence.slot = known
            self.pool.drop(group, own)
        last, before = sequence.checkpoint, 0
        if last is not None and last.node is not node:
            before = last.tokens
            if last.tokens - last.before < MIN_CHECKPOINT_TOKENS:
                before = last.before
                if last.node.pages[-1] == last.slot and not slots.uses[last.slot]:
                    self._forget(last.node, group)
        sequence.checkpoint = Checkpoint(node, sequence.slot, sequence.computed, before)

    def checkpoint_before(self, begin: int, end: int) -> int:
        """Where the last part of a prompt begins whose tokens from `begin` on are computed: `end` if in no parts.

        There a prompt may start that begins with this one: all but its last token, in whole pages.
        """
        last = (end - 1) // PAGE * PAGE
        return last if self.pool.slots is not None and last - begin >= MIN_CHECKPOINT_TOKENS else end

    def evict(self, counts: Iterable[int]) -> bool:
        """Free so many idle pages of each group, the least recently used first; False, and no change, if too few."""
        wanted = [(units, len(units.free) + count) for units, count in zip(self.pool.units, counts)]
        if any(free > len(pages.free) + len(pages.idle) for pages, free in wanted):
            return False
        evicted = []
        for group, (pages, free) in enumerate(wanted):
            while len(pages.free) < free:  # a page of a group without a window takes those of others along
                page = next(iter(pages.idle))
                node = self._owners[group][page]
                evicted += [(node, page)] if not group else []
                self._forget(node, group)
        self.on_eviction(evicted)
        return True

    def _forget(self, node: Node, group: int) -> None:
        """A page leaves the tree; one of a group without a window takes its node, a leaf, along."""
        leaf = not self._sheds[group]
        assert not (leaf and node.children)
        for each, page in enumerate(node.pages):
            if page != _NONE and (leaf or each == group):
                self.pool.units[each].let_go(page)
                del self._owners[each][page]
                node.pages[each] = _NONE
        while node.parent is not None and not node.children and all(page == _NONE for page in node.pages):
            parent = node.parent
            del parent.children[node.tokens][node.few_mask]
            if not parent.children[node.tokens]:
                del parent.children[node.tokens]
            node = parent

    def discard(self, sequence: Sequence) -> None:
        """What only this sequence uses is not found any more, nor what follows it: its numbers are not finite, say."""
        node = sequence.node
        for at in reversed(range(sequence.shared)):
            assert node is not None
            own, below = [*(table[at] for table in sequence.tables), sequence.slot], [node, *self._nodes(node)]
            there = [(group, page) for one in below for group, page in enumerate(one.pages) if page != _NONE]
            if any(self.pool.units[group].uses[page] > (own[group] == page) for group, page in there):
                break
            parent = node.parent
            for one in reversed(below):  # leaves first
                for group in range(len(one.pages)):
                    if one.pages[group] != _NONE:
                        self._forget(one, group)
            node = parent
        sequence.node, sequence.shared = None, 0

    def pin(self, sequence: Sequence) -> Pin:
        """Keep the full pages of the sequence's prompt, as far as they are computed, until `unpin`."""
        nodes = self.path(sequence)[: len(sequence.request.tokens) // PAGE]
        pin = Pin([(group, page) for group, page, _ in self._pages_of(nodes[: self._usable(nodes)])])
        for group, page in pin.pages:
            self.pool.units[group].use(page)
        self.pins[pin] = None
        return pin

    def path(self, sequence: Sequence) -> list[Node]:
        """The nodes that the sequence uses, in the order of its pages."""
        nodes, node = [], sequence.node
        while node is not None and node.parent is not self._root:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def unpin(self, pin: Pin) -> None:
        """The prefix may be evicted again."""
        del self.pins[pin]
        for group, page in reversed(pin.pages):
            self.pool.drop(group, page)

    def family(self, sequence: Sequence) -> Hashable:
        """Sequences of one family with the same first tokens can share pages."""
        length, adapter = sequence.few_from, sequence.request.adapter
        namespace = sequence.request.namespace, 0 if adapter is None else adapter.serial
        other = self._recompute_above is not None and length > self._recompute_above
        return namespace, other, 0 if self._rope_above is None else max(length, self._rope_above)

    def _nodes(self, top: Node) -> Iterator[Node]:
        """All below a node, each before those below it."""
        waiting = [top]
        while waiting:
            below = [node for variants in waiting.pop().children.values() for node in variants.values()]
            yield from below
            waiting += below

    def invariants(self) -> None:
        """Raises AssertionError where the pool's pages and the tree's do not agree."""
        held: list[dict[int, Node]] = [{} for _ in self.pool.units]
        for node in self._nodes(self._root):
            assert node.parent is not None
            assert node.parent.children[node.tokens][node.few_mask] is node
            assert node.children or any(page != _NONE for page in node.pages)
            for group, page in enumerate(node.pages):
                assert self._sheds[group] or (page == _NONE) == (node.parent is self._root)
                if page != _NONE:
                    assert held[group].setdefault(page, node) is node
        assert held == self._owners
        for pages, owners in zip(self.pool.units, self._owners):
            assert {page for page, held_ in enumerate(pages.held) if held_} == set(owners)
