"""Full pages by what they hold, so that a prompt starts where another one with the same beginning has come to.

A node is a page: its 16 tokens, after those of its ancestors, compared one by one. The root is chosen by the namespace,
and by what RoPE's frequencies depend on beside the position. A node also says which of its tokens were computed with
decode's arithmetic, so that pages which differ in bits are never taken for each other by who minds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.sequence import Sequence
from tir_schedules.step_layout import PAGE

_NONE = -1


class Node:
    """A full page. `children`: tokens -> few mask (`Sequence.few_mask`) -> node. `pages`: by group, -1 where evicted.

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


class Pin:
    """A prefix that stays; for `PrefixTree.unpin`. `pages`: (group, page) of each use."""

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
        self._root = Node(None, (), 0, [_NONE] * len(pool.groups))
        self._owners: list[dict[int, Node]] = [{} for _ in pool.groups]  # by group, page -> node

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
        """With how many of these nodes a sequence can start: every page that a query after them sees is there."""
        group, about = len(self.pool.groups) - 1, self.pool.groups[-1]
        if not about.window:
            return len(nodes)
        run, usable = 0, 0  # `run`: pages in a row that are there
        for count, node in enumerate(nodes, 1):
            run = run + 1 if node.pages[group] != _NONE else 0
            if run >= count - about.kept_from(count * PAGE):
                usable = count
        return usable

    def take(self, sequence: Sequence) -> int:
        """The sequence, which has no pages, starts with those that are found -> how many tokens."""
        nodes = self.match(sequence)
        for group, page, at in self._pages_of(nodes):
            self.pool.pages[group].use(page)
            table = sequence.tables[group]
            table.extend([_NONE] * (at - len(table)))
            table.append(page)
        sequence.kept_from = [about.kept_from(len(nodes) * PAGE) for about in self.pool.groups]
        sequence.computed = len(nodes) * PAGE
        sequence.node, sequence.shared = nodes[-1] if nodes else None, len(nodes)
        return sequence.computed

    def _pages_of(self, nodes: list[Node]) -> Iterator[tuple[int, int, int]]:
        """(group, page, its place in the sequence) of what a sequence that starts with these nodes needs."""
        for group, about in enumerate(self.pool.groups):
            for at in range(about.kept_from(len(nodes) * PAGE), len(nodes)):
                yield group, nodes[at].pages[group], at

    def give_back(self, sequence: Sequence) -> None:
        """Undo `take`."""
        self.pool.release(sequence)

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

    def evict(self, counts: Iterable[int]) -> bool:
        """Free so many idle pages of each group, the least recently used first; False, and no change, if too few."""
        wanted = [(pages, len(pages.free) + count) for pages, count in zip(self.pool.pages, counts)]
        if any(free > len(pages.free) + len(pages.idle) for pages, free in wanted):
            return False
        evicted = []
        for group, (pages, free) in enumerate(wanted):
            while len(pages.free) < free:  # a page of the first group takes that of the second along
                page = next(iter(pages.idle))
                node = self._owners[group][page]
                evicted += [(node, page)] if not group else []
                self._forget(node, group)
        self.on_eviction(evicted)
        return True

    def _forget(self, node: Node, group: int) -> None:
        """A page leaves the tree; a page without a window takes its node, a leaf, along."""
        leaf = not self.pool.groups[group].window
        assert not (leaf and node.children)
        for each, page in enumerate(node.pages):
            if page != _NONE and (leaf or each == group):
                self.pool.pages[each].let_go(page)
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
            own, below = [table[at] for table in sequence.tables], [node, *self._nodes(node)]
            there = [(group, page) for one in below for group, page in enumerate(one.pages) if page != _NONE]
            if any(self.pool.pages[group].uses[page] > (own[group] == page) for group, page in there):
                break
            parent = node.parent
            for one in reversed(below):  # leaves first
                for group in range(len(own)):
                    if one.pages[group] != _NONE:
                        self._forget(one, group)
            node = parent
        sequence.node, sequence.shared = None, 0

    def pin(self, sequence: Sequence) -> Pin:
        """Keep the full pages of the sequence's prompt, as far as they are computed, until `unpin`."""
        nodes = self.path(sequence)[: len(sequence.request.tokens) // PAGE]
        pin = Pin([(group, page) for group, page, _ in self._pages_of(nodes[: self._usable(nodes)])])
        for group, page in pin.pages:
            self.pool.pages[group].use(page)
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
        held: list[dict[int, Node]] = [{} for _ in self.pool.groups]
        for node in self._nodes(self._root):
            assert node.parent is not None
            assert node.parent.children[node.tokens][node.few_mask] is node
            assert node.children or any(page != _NONE for page in node.pages)
            for group, page in enumerate(node.pages):
                assert self.pool.groups[group].window or (page == _NONE) == (node.parent is self._root)
                if page != _NONE:
                    assert held[group].setdefault(page, node) is node
        assert held == self._owners
        for pages, owners in zip(self.pool.pages, self._owners):
            assert {page for page, held_ in enumerate(pages.held) if held_} == set(owners)
