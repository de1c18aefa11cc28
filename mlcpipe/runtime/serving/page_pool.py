"""Which sequences use which pages and slots of the states. This module moves no data."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from mlcpipe.bundle.memory import pages_at_once
from mlcpipe.bundle.states import first_page
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tir_schedules.step_layout import PAGE


@dataclass(frozen=True)
class PageGroup:
    """States that share `pages` page ids. A query attends to `window` tokens, itself included; 0: all."""

    pages: int
    window: int = 0

    def kept_from(self, position: int) -> int:
        """The first page that a query at this position, or a later one, needs."""
        return first_page(self.window, position)

    def most(self, tokens: int, chunk: int) -> int:
        """Pages that a sequence of `tokens` tokens needs at once, computed in chunks of `chunk` rows."""
        return pages_at_once(self.window, tokens, chunk)


class PageCopy(NamedTuple):
    """Copy a page of a group before the step's forwards; no target of a step is also a source."""

    source: int
    target: int
    group: int = 0


class UnitCounts(NamedTuple):
    """Pages of a group, or slots: free, kept only so that a later prompt may find them, used by sequences."""

    free: int
    idle: int
    used: int


class _Units:
    """The pages of one group, or the slots. Each is free, idle (the tree holds it, no sequence uses it), or used."""

    def __init__(self, count: int) -> None:
        self.uses = [0] * count
        self.held = bytearray(count)
        self.free = list(range(count - 1, -1, -1))
        self.idle: OrderedDict[int, None] = OrderedDict()  # the least recently used first

    def new(self) -> int:
        page = self.free.pop()
        self.uses[page] = 1
        return page

    def use(self, page: int) -> None:
        if not self.uses[page]:
            del self.idle[page]
        self.uses[page] += 1

    def drop(self, page: int) -> bool:
        """Drop one use; True if it was the last."""
        self.uses[page] -= 1
        if self.uses[page]:
            return False
        if self.held[page]:
            self.idle[page] = None
        else:
            self.free.append(page)
        return True

    def hold(self, page: int) -> None:
        self.held[page] = 1

    def let_go(self, page: int) -> None:
        self.held[page] = 0
        if not self.uses[page]:
            del self.idle[page]
            self.free.append(page)


class PagePool:
    """Pages of all groups, slots if the model has states in them, and the uses that sequences make of both.

    `units` are the pages of each group, then the slots, if there are any. `frees` counts releases, so that a blocked
    request is retried only after one.

    A sequence has the states after its computed tokens in `slot`; a step reads that one and writes `next_slot`. That is
    another one if others use the slot too, or the tree holds it: so forks and checkpoints copy nothing. Where a draft
    is checked, the step also writes `row_slots`, the states after each row: that of the last accepted row is kept.
    """

    def __init__(self, groups: Iterable[PageGroup], slots: int = 0) -> None:
        self.groups = tuple(groups)
        self.pages = tuple(_Units(group.pages) for group in self.groups)
        self.slots = _Units(slots) if slots else None
        self.units = (*self.pages, *([self.slots] if self.slots is not None else []))
        self.frees = 0
        self._copies: list[PageCopy] = []

    def sequence(self, id: int, request: ScheduledRequest) -> Sequence:
        """A sequence without pages."""
        return Sequence(id, request, [array("i") for _ in self.groups], [0] * len(self.groups))

    def reserve(self, sequence: Sequence, rows: int) -> bool:
        """Reserve pages for `rows` more tokens, written by this sequence alone; False, and no change, if not free.

        A page that others use too is replaced by a copy; `take_copies` has the pairs. With slots, one for the states,
        and one for each token of a draft.
        """
        if self.slots is not None and self._missing_slots(sequence):
            if any(missing > 0 for missing in self.missing(sequence, rows)):
                return False
            if not self._has_next_slot(sequence):
                sequence.next_slot = self.slots.new()
            while len(sequence.row_slots) < len(sequence.draft):
                sequence.row_slots.append(self.slots.new())
        end, (at, place) = sequence.computed + rows, divmod(sequence.computed, PAGE)
        for pages, table in zip(self.pages, sequence.tables):
            if len(table) * PAGE < end or (place and (pages.uses[table[at]] > 1 or pages.held[table[at]])):
                break
        else:
            return True
        lacking = self.missing(sequence, rows)
        if any(missing > 0 for missing in lacking):
            return False
        for group, (pages, table) in enumerate(zip(self.pages, sequence.tables)):
            if self._shares_end(group, sequence):
                source, target = table[at], pages.new()
                table[at] = target
                self._copies.append(PageCopy(source, target, group))  # which keeps the use of the source
            while len(table) * PAGE < end:
                table.append(pages.new())
        return True

    def missing(self, sequence: Sequence, rows: int) -> list[int]:
        """By group, how many pages `reserve` would need beyond the free ones; negative if some would be left."""
        wanted = -(-(sequence.computed + rows) // PAGE)
        lacking = [
            max(0, wanted - len(table)) + self._shares_end(group, sequence) - len(self.pages[group].free)
            for group, table in enumerate(sequence.tables)
        ]
        if self.slots is not None:
            lacking.append(self._missing_slots(sequence) - len(self.slots.free))
        return lacking

    def _missing_slots(self, sequence: Sequence) -> int:
        """How many slots `reserve` takes."""
        return (not self._has_next_slot(sequence)) + max(0, len(sequence.draft) - len(sequence.row_slots))

    def _has_next_slot(self, sequence: Sequence) -> bool:
        """Whether the next step has a slot to write, if need be the one that it reads."""
        slots, slot = self.slots, sequence.slot
        if sequence.next_slot >= 0 or slots is None or slot < 0 or sequence.request.redraws:
            return sequence.next_slot >= 0
        own = slots.uses[slot] == 1 and not slots.held[slot]
        sequence.next_slot = slot if own else -1
        return own

    def advance(self, sequence: Sequence, rows: int, of_draft: int = 0, drafted: int = 0) -> None:
        """Record that a step has computed `rows` more tokens of the sequence, `of_draft` of them of `drafted`."""
        sequence.computed += rows
        if sequence.next_slot >= 0:
            slots = [sequence.slot, *sequence.row_slots[:drafted], sequence.next_slot]
            sequence.slot, sequence.next_slot = slots[1 + of_draft], -1
            for slot in sorted({*slots, *sequence.row_slots} - {-1, sequence.slot}):
                self.drop(len(self.groups), slot)
            sequence.row_slots = []

    def repeat(self, sequence: Sequence, rows: int) -> None:
        """Record a step of `rows` rows whose last one has to be computed again.

        States in slots cannot go back by a row, so none counts there; `redraws` kept the states before.
        """
        if self.slots is None:
            self.advance(sequence, rows - 1)
            return
        self._drop_unwritten(sequence)

    def _drop_unwritten(self, sequence: Sequence) -> None:
        """Drop the slots that a step should have written."""
        for slot in sorted({sequence.next_slot, *sequence.row_slots} - {-1, sequence.slot}):
            self.drop(len(self.groups), slot)
        sequence.next_slot, sequence.row_slots = -1, []

    def _shares_end(self, group: int, sequence: Sequence) -> bool:
        """Whether the page of the next token has tokens already, and is not this sequence's alone."""
        if not sequence.computed % PAGE:
            return False
        page, pages = sequence.tables[group][sequence.computed // PAGE], self.pages[group]
        # Planned copies of it are made before anything is written to it.
        copies = sum((copy.source, copy.group) == (page, group) for copy in self._copies)
        return pages.uses[page] - copies > 1 or bool(pages.held[page])

    def take_copies(self) -> list[PageCopy]:
        """The copies that reservations since the last call require before anything is written."""
        copies, self._copies = self._copies, []
        for copy in copies:
            self.drop(copy.group, copy.source)
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start `child` with the computed tokens of `parent`, which its own begin with."""
        count = -(-parent.computed // PAGE)
        for group, (pages, table) in enumerate(zip(self.pages, parent.tables)):
            child.tables[group] = table[:count]
            child.kept_from[group] = parent.kept_from[group]
            for page in child.tables[group][parent.kept_from[group] :]:
                pages.use(page)
        child.computed, child.node, child.shared = parent.computed, parent.node, parent.shared
        child.taken_page, child.taken_mask = parent.taken_page, parent.taken_mask
        child.slot = parent.slot
        if self.slots is not None:
            self.slots.use(child.slot)

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """Keep the pages of the first so many tokens; what follows in the last one is written again."""
        count = -(-tokens // PAGE)
        for group, table in enumerate(sequence.tables):
            for page in reversed(table[count:]):
                if page >= 0:
                    self.drop(group, page)
            del table[count:]
        sequence.computed = min(sequence.computed, tokens)

    def slide(self, sequence: Sequence, tokens: int | None = None) -> None:
        """Release pages that no query after the first `tokens` tokens attends to; by default after the computed ones.

        Earlier pages are not reserved later.
        """
        for group, about in enumerate(self.groups):
            if about.window:
                first, table = about.kept_from(sequence.computed if tokens is None else tokens), sequence.tables[group]
                for at in range(sequence.kept_from[group], min(first, len(table))):
                    self.drop(group, table[at])
                    table[at] = -1
                table.extend([-1] * (first - len(table)))
                sequence.kept_from[group] = max(first, sequence.kept_from[group])

    def release(self, sequence: Sequence) -> None:
        """Release all units of the sequence, its last page first, so that a prefix outlives its continuation."""
        self.truncate(sequence, 0)
        self._drop_unwritten(sequence)
        if sequence.slot >= 0:
            self.drop(len(self.groups), sequence.slot)
        sequence.slot = -1
        sequence.checkpoint = None
        sequence.kept_from = [0] * len(self.groups)
        sequence.node, sequence.shared = None, 0
        sequence.taken_page, sequence.taken_mask = -1, 0

    def available(self, group: int) -> int:
        """Units that are free, or would be if the tree gave up the idle ones."""
        return len(self.units[group].free) + len(self.units[group].idle)

    def counts(self) -> list[UnitCounts]:
        """By group, then of the slots."""
        sizes = ((len(units.free), len(units.idle), len(units.uses)) for units in self.units)
        return [UnitCounts(free, idle, all_ - free - idle) for free, idle, all_ in sizes]

    def drop(self, group: int, page: int) -> None:
        """Drop one use of a page, or a slot."""
        if self.units[group].drop(page):
            self.frees += 1
            # A planned copy to this page is not needed, and its source not kept.
            for copy in [copy for copy in self._copies if (copy.target, copy.group) == (page, group)]:
                self._copies.remove(copy)
                self.drop(group, copy.source)

    def invariants(self, sequences: Iterable[Sequence], pinned: Iterable[tuple[int, int]] = ()) -> None:
        """Raises AssertionError where the accounts of these sequences and of pinned (group, page) do not add up."""
        sequences, pinned = list(sequences), list(pinned)
        slots = ([one for one in {s.slot, s.next_slot, *s.row_slots} if one >= 0] for s in sequences)
        tables = [[s.tables[group] for s in sequences] for group in range(len(self.groups))] + [list(slots)]
        for group, pages in enumerate(self.units):
            uses = Counter(page for table in tables[group] for page in table if page >= 0)
            uses.update(page for g, page in pinned if g == group)
            uses.update(copy.source for copy in self._copies if copy.group == group)
            assert [uses[page] for page in range(len(pages.uses))] == pages.uses
            free, idle = set(pages.free), set(pages.idle)
            assert len(free) == len(pages.free)
            assert free == {page for page, n in enumerate(pages.uses) if not n and not pages.held[page]}
            assert idle == {page for page, n in enumerate(pages.uses) if not n and pages.held[page]}
            for s in sequences if group < len(self.groups) else ():
                table, kept = s.tables[group], s.kept_from[group]
                assert all(page < 0 for page in table[:kept]) and all(page >= 0 for page in table[kept:])
                assert s.computed <= len(table) * PAGE
                assert all(uses[page] == 1 for page in table[-(-s.computed // PAGE) :])
