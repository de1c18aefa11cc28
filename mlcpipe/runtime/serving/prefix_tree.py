"""Full pages by their tokens, so that a prompt starts where another one with the same beginning ended.

A node is a page: its 16 tokens, after those of its ancestors, compared one by one. The root is chosen by the namespace,
and by what RoPE's frequencies depend on apart from the position. A node also says which tokens were computed with the
arithmetic of decode, so that pages which differ in bits are never confused when a request asks for deterministic reuse.

Where tokens of a block see each other, a page is known by its own and those up to the end of its block.

States in slots belong to one position: a node may have the slot with the states after its last token, a checkpoint, and
a prompt can start only after such a node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator

from mlcpipe.runtime.serving.message_borders import MIN_CHECKPOINT_TOKENS, border_between
from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.prefix_node import NONE, Checkpoint, Node
from mlcpipe.runtime.serving.sequence import Sequence
from tir_schedules.step_layout import PAGE

_MOST_EVICTED = 1 << 14  # of which is remembered that they were here

Family = tuple[tuple[Hashable, int], bool, int]  # (namespace, adapter), whether frequencies are others, length of RoPE


def page_tokens(sequence: Sequence, at: int) -> tuple[int, ...]:
    """What a page of a sequence depends on beyond the pages before: its tokens, and those after it in its block."""
    end, how = (at + 1) * PAGE, sequence.request.denoising
    return tuple(sequence.tokens[at * PAGE : end if how is None else how.end(end - 1)])


class Pin:
    """A prefix that stays until `PrefixTree.unpin`. `pages`: (group, page) of each use, also of a slot."""

    def __init__(self, pages: list[tuple[int, int]]) -> None:
        self.pages = pages


class PrefixTree:
    """All full pages that sequences have computed, until their memory is needed.

    A sequence uses every page of its path in groups without a window. It drops them from the end, so among the idle
    pages of such a group the least recently used one is always a leaf. Pages of a window are evicted separately: later
    pages may still be found, as long as the last window is there.

    recompute_above  prompts longer than this have other frequencies (longrope)
    rope_above       frequencies of longer prompts depend on the length itself (dynamic)
    """

    def __init__(self, pool: PagePool, recompute_above: int | None = None, rope_above: int | None = None) -> None:
        self.pool = pool
        self.pins: dict[Pin, None] = {}
        self.evicted: OrderedDict[tuple[int, int], None] = (
            OrderedDict()
        )  # (key of a node, group) of lost units, the last
        # Called with nodes and their pages of the first group, before these are written again.
        self.on_eviction: Callable[[list[tuple[Node, int]]], None] = lambda evicted: None
        self._recompute_above, self._rope_above = recompute_above, rope_above
        self._root = Node(None, (), 0, [NONE] * len(pool.units))
        self._owners: list[dict[int, Node]] = [{} for _ in pool.units]  # by group, page -> node; last of the slots
        # Groups whose pages a node loses separately: the others' are needed by all nodes below.
        self._sheds = [bool(group.window) for group in pool.groups] + [True] * (pool.slots is not None)

    def match(self, sequence: Sequence) -> list[Node]:
        """Nodes with which the sequence could start; its last token must be computed to sample the next."""
        found, how = self.known(sequence), sequence.request.denoising
        usable = self._usable(found)
        return found[: usable if how is None else usable // how.pages * how.pages]

    def lost(self, sequence: Sequence) -> int:
        """Known tokens beyond the computed ones: the state, or the window, that the next one needs is gone."""
        return max(0, len(self.known(sequence)) * PAGE - sequence.computed) if any(self._sheds) else 0

    def known(self, sequence: Sequence) -> list[Node]:
        """The nodes of its tokens, whether or not it could start with them."""
        found: list[Node] = []
        family = self._root.children.get(self.family(sequence))
        if family is None:
            return found
        node, exact = family[0], sequence.request.deterministic
        for at in range((len(sequence.tokens) - 1) // PAGE):
            variants = node.children.get(page_tokens(sequence, at))
            if variants is None:
                break
            best = variants.get(sequence.decode_mask(at))
            if best is None:
                if exact:
                    break
                best = next(iter(variants.values()))
            found.append(best)
            node = best
        return found

    def _usable(self, nodes: list[Node]) -> int:
        """With how many of these nodes a sequence can start: all that the next token needs is there."""
        if not any(self._sheds):
            return len(nodes)
        usable, runs = 0, [0] * len(self.pool.groups)  # pages in a row that are there
        for count, node in enumerate(nodes, 1):
            runs = [run + 1 if page != NONE else 0 for run, page in zip(runs, node.pages)]
            there = all(run >= count - about.kept_from(count * PAGE) for run, about in zip(runs, self.pool.groups))
            if there and (self.pool.slots is None or node.pages[-1] != NONE):
                usable = count
        return usable

    def take(self, sequence: Sequence) -> int:
        """Start a sequence without pages with those that are found -> how many tokens."""
        nodes = self.match(sequence)
        for group, page, at in self._pages_of(nodes):
            self.pool.units[group].use(page)
            if group == len(sequence.tables):
                sequence.slot = page
                continue
            table = sequence.tables[group]
            table.extend([NONE] * (at - len(table)))
            table.append(page)
        sequence.kept_from = [about.kept_from(len(nodes) * PAGE) for about in self.pool.groups]
        sequence.computed = len(nodes) * PAGE
        sequence.node, sequence.shared = nodes[-1] if nodes else None, len(nodes)
        return sequence.computed

    def _pages_of(self, nodes: list[Node]) -> Iterator[tuple[int, int, int]]:
        """(group, page, its place in the sequence) of the pages that a sequence needs to start with these nodes.

        The slot comes last, if there are any.
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
        """Reserve pages for `rows` more rows, evicting unused prefixes if necessary; False if there are not enough."""
        return self.pool.reserve(sequence, rows) or (
            self.evict(self.pool.missing(sequence, rows)) and self.pool.reserve(sequence, rows)
        )

    def can_go_back(self, sequence: Sequence, tokens: int) -> bool:
        """Whether the sequence still has the states after its first `tokens` tokens: windows and slots lose some."""
        slid = any(about.kept_from(tokens) < kept for about, kept in zip(self.pool.groups, sequence.kept_from))
        return tokens == sequence.computed or not (slid or self.pool.slots is not None)

    def shared(self, ended: Sequence, sequence: Sequence) -> int:
        """Number of tokens that a sequence could take over from another one, whose last page may be in part filled.

        None for deterministic ones, as those of the last page were computed with any arithmetic.
        """
        if sequence.request.deterministic or self.family(ended) != self.family(sequence):
            return 0
        most = min(ended.computed, len(sequence.tokens) - 1)
        one, other = ended.tokens[:most], sequence.tokens[:most]
        if one != other:
            most = next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)
        if sequence.request.denoising is not None:
            most = sequence.request.denoising.begin(most)
        return most if self.can_go_back(ended, most) else 0

    def go_back(self, sequence: Sequence, tokens: int) -> None:
        """Keep the first `tokens` tokens of the sequence, to which it `can_go_back`."""
        self.pool.truncate(sequence, tokens)
        while sequence.shared > tokens // PAGE:
            assert sequence.node is not None
            sequence.node, sequence.shared = sequence.node.parent, sequence.shared - 1

    def add(self, sequence: Sequence) -> None:
        """Make full pages of the sequence findable. Where one is known already, the sequence continues with that one.

        Its numbers are the same: those of a row depend only on the tokens before it and on their arithmetic.
        """
        while sequence.shared < sequence.computed // PAGE:
            at = sequence.shared
            node = sequence.node or self._root.child(self.family(sequence), 0)
            node = node.child(page_tokens(sequence, at), sequence.decode_mask(at))
            self._share(node, sequence, at)
            sequence.node, sequence.shared = node, at + 1

    def _share(self, node: Node, sequence: Sequence, at: int) -> None:
        """The node and the sequence have one page in each group, the node's if it has one."""
        for group, (pages, table) in enumerate(zip(self.pool.pages, sequence.tables)):
            known, own = node.pages[group], table[at]
            if own == NONE:
                continue
            if known == NONE:
                node.pages[group] = own
                self._owners[group][own] = node
                pages.hold(own)
            elif known != own:
                pages.use(known)
                table[at] = known
                self.pool.drop(group, own)

    def checkpoint(self, sequence: Sequence) -> None:
        """Give the slot of a sequence at the end of a page to its node, so that a prompt may start there.

        Its previous checkpoint is removed if it is too close to the one before that, so that a long answer leaves few.
        """
        node, slots = sequence.node, self.pool.slots
        if slots is None or node is None or sequence.computed != sequence.shared * PAGE:
            return
        known, own, group = node.pages[-1], sequence.slot, len(self.pool.groups)
        if known == NONE:
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

    def checkpoint_before(self, begin: int, end: int, borders: tuple[int, ...] = ()) -> int:
        """Where to split a prompt whose last tokens, from `begin` to `end`, are computed; `end` for no split.

        Prompts that begin with this one may start there: after its messages, or all but its last token, in whole pages.
        """
        if self.pool.slots is None:
            return end
        last, border = (end - 1) // PAGE * PAGE, border_between(borders, begin, end)
        if border is not None:
            return border
        return last if last - begin >= MIN_CHECKPOINT_TOKENS else end

    def chunk_before(self, begin: int, end: int, borders: tuple[int, ...]) -> int:
        """Where a chunk of a prompt ends that has room up to `end`: at a border of messages, if half of it stays."""
        border = None if self.pool.slots is None else border_between(borders, begin, end, 0.5)
        return end if border is None else border

    def evict(self, counts: Iterable[int]) -> bool:
        """Free so many idle pages of each group, the least recently used first; False, and no change, if too few."""
        wanted = [(units, len(units.free) + count) for units, count in zip(self.pool.units, counts)]
        if any(free > len(pages.free) + len(pages.idle) for pages, free in wanted):
            return False
        evicted = []
        for group, (pages, free) in enumerate(wanted):
            while len(pages.free) < free:  # a page of a group without a window takes the others' along
                page = next(iter(pages.idle))
                node = self._owners[group][page]
                evicted += [(node, page)] if not group else []
                self.evicted[node.key, group] = None
                if len(self.evicted) > _MOST_EVICTED:
                    self.evicted.popitem(last=False)
                self._forget(node, group)
        self.on_eviction(evicted)
        return True

    def _forget(self, node: Node, group: int) -> None:
        """Remove a page from the tree; one of a group without a window takes its node, a leaf, along."""
        leaf = not self._sheds[group]
        assert not (leaf and node.children)
        for each, page in enumerate(node.pages):
            if page != NONE and (leaf or each == group):
                self.pool.units[each].let_go(page)
                del self._owners[each][page]
                node.pages[each] = NONE
        while node.parent is not None and not node.children and all(page == NONE for page in node.pages):
            parent = node.parent
            del parent.children[node.tokens][node.decode_mask]
            if not parent.children[node.tokens]:
                del parent.children[node.tokens]
            node = parent

    def discard(self, sequence: Sequence) -> None:
        """Remove pages that only this sequence uses, and those below them: for example, if numbers are not finite."""
        node = sequence.node
        for at in reversed(range(sequence.shared)):
            assert node is not None
            own, below = [*(table[at] for table in sequence.tables), sequence.slot], [node, *self._nodes(node)]
            there = [(group, page) for one in below for group, page in enumerate(one.pages) if page != NONE]
            if any(self.pool.units[group].uses[page] > (own[group] == page) for group, page in there):
                break
            parent = node.parent
            for one in reversed(below):  # leaves first
                for group in range(len(one.pages)):
                    if one.pages[group] != NONE:
                        self._forget(one, group)
            node = parent
        sequence.node, sequence.shared = None, 0

    def pin(self, sequence: Sequence) -> Pin:
        """Keep the full computed pages of the sequence's prompt until `unpin`."""
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
        """Let the prefix be evicted again."""
        del self.pins[pin]
        for group, page in reversed(pin.pages):
            self.pool.drop(group, page)

    def families(self) -> dict[Family, Node]:
        """The nodes below the root."""
        return {family: variants[0] for family, variants in self._root.children.items()}

    def family(self, sequence: Sequence) -> Family:
        """Sequences of one family with the same first tokens can share pages."""
        length, adapter = sequence.decode_from, sequence.request.adapter
        space, how = sequence.request.namespace, sequence.request.denoising
        namespace = space if how is None else (space, how.block), 0 if adapter is None else adapter.serial
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
            assert node.parent.children[node.tokens][node.decode_mask] is node
            assert node.children or any(page != NONE for page in node.pages)
            for group, page in enumerate(node.pages):
                assert self._sheds[group] or (page == NONE) == (node.parent is self._root)
                if page != NONE:
                    assert held[group].setdefault(page, node) is node
        assert held == self._owners
        for pages, owners in zip(self.pool.units, self._owners):
            assert {page for page, held_ in enumerate(pages.held) if held_} == set(owners)
