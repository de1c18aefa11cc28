"""Pages of preempted sequences in the host's memory, where copying them is cheaper than computing their tokens again.

A preempted sequence leaves its full pages to the prefix tree. Those that the tree evicts while it waits are copied to
the host, the last ones first, and back when it is admitted again, if they follow the pages that the tree still has.
It pays on GPUs with more long answers than pages; on CPUs, and with layers that slide, tokens are computed again.
"""

from __future__ import annotations

import time
from collections import abc, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.prefix_node import Node
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import Sequence
from tir_schedules.step_layout import PAGE

_LATEST = 0.25  # weight of the latest copy in the rate
_FAILURES = (MlcpipeError, RuntimeError, MemoryError)  # of a device, or of the host's memory


class PageCopier(Protocol):
    """Copies pages of all layers."""

    def copy_out(self, ids: abc.Sequence[int]) -> NDArray[np.int8]:
        """A copy int8[n, bytes] of these pages."""
        ...

    def copy_in(self, ids: abc.Sequence[int], pages: NDArray[np.int8]) -> None:
        """Replace these pages."""
        ...


@dataclass
class _Waiting:
    """A preempted sequence: the nodes of its full pages, and by place those pages that are on the host."""

    nodes: list[Node]
    pages: dict[int, NDArray[np.int8]] = field(default_factory=dict)


class Swap:
    """At most `room` bytes of pages on the host, and the seconds and tokens of the copies.

    A page is copied out where 2 bytes / rate < the seconds that its tokens' rows and keys would take. `rate`, in bytes
    per second, is measured by every copy out, the first ones at construction; the costs are those of the steps so far.
    After a failed copy the tokens are computed again. A page that two sequences need counts twice.
    """

    def __init__(
        self,
        copier: PageCopier,
        tree: PrefixTree,
        cost: CostModel,
        room: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.room, self.bytes, self.seconds, self.tokens_out, self.tokens_in = room, 0, 0.0, 0, 0
        self.rate = 0.0
        self._copier, self._tree, self._cost, self._clock = copier, tree, cost, clock
        self._waiting: dict[Sequence, _Waiting] = {}
        self._wanted: dict[Node, list[tuple[Sequence, int]]] = defaultdict(
            list
        )  # the sequences of a page, with its place
        tree.on_eviction = self._save
        for _ in range(2):  # the first copy of a device allocates what later ones need
            self.rate = 0.0
            self.page_bytes = self._read([0]).nbytes
        self.seconds = 0.0

    def take_seconds(self) -> float:
        """Seconds of copies since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def watch(self, sequence: Sequence) -> None:
        """From now on save evicted pages of a sequence, which is about to be preempted."""
        nodes = self._tree.path(sequence)
        self._waiting[sequence] = _Waiting(nodes)
        for place, node in enumerate(nodes):
            self._wanted[node].append((sequence, place))

    def forget(self, sequence: Sequence) -> dict[int, NDArray[np.int8]]:
        """Stop saving pages of the sequence -> those on the host by place."""
        waiting = self._waiting.pop(sequence, None)
        if waiting is None:
            return {}
        for place, node in enumerate(waiting.nodes):
            if node in self._wanted:
                self._wanted[node].remove((sequence, place))
                if not self._wanted[node]:
                    del self._wanted[node]
        self.bytes -= len(waiting.pages) * self.page_bytes
        return waiting.pages

    def restore(self, sequence: Sequence, reserve: Callable[[Sequence, int], bool]) -> None:
        """Copy back the pages that follow those of the tree, with which the sequence was admitted.

        `reserve(sequence, tokens)` makes room for more tokens of it.
        """
        pages, begin = self.forget(sequence), sequence.shared
        end = begin
        while end in pages:
            end += 1
        if end == begin or not reserve(sequence, (end - begin) * PAGE):
            return
        began = self._clock()
        try:
            self._copier.copy_in(sequence.tables[0][begin:end], np.stack([pages[at] for at in range(begin, end)]))
        except _FAILURES:
            return
        finally:
            self.seconds += self._clock() - began
        self.tokens_in += (end - begin) * PAGE
        sequence.computed = end * PAGE
        self._tree.add(sequence)

    def is_cheaper(self, decode_mask: int, place: int) -> bool:
        """Whether copying a page out and back takes less time than its rows, those of `decode_mask` as decode rows."""
        decode, keys = decode_mask.bit_count(), place * PAGE + (PAGE + 1) // 2  # of a row, on average
        load = Load(decode, decode * keys, PAGE - decode, (PAGE - decode) * keys)
        return self.rate > 0 and 2 * self.page_bytes / self.rate < self._cost.row_seconds(load)

    def _save(self, evicted: Iterable[tuple[Node, int]]) -> None:
        """Copy those of (node, page) that a waiting sequence needs, if that is cheaper and fits."""
        saved: list[tuple[int, list[tuple[Sequence, int]]]] = []
        for node, page in evicted:
            owners = self._wanted.pop(node, [])
            cheaper = bool(owners) and self.is_cheaper(node.decode_mask, owners[0][1])
            if kept := [owner for owner in owners if cheaper and self._take_room(owner[0])]:
                saved.append((page, kept))
        if not saved:
            return
        try:
            copies = [page.copy() for page in self._read([page for page, _ in saved])]
        except _FAILURES:
            self.bytes -= sum(len(kept) for _, kept in saved) * self.page_bytes
            return
        for (_, kept), copy in zip(saved, copies):
            for sequence, place in kept:
                self._waiting[sequence].pages[place] = copy
        self.tokens_out += len(saved) * PAGE

    def _take_room(self, sequence: Sequence) -> bool:
        """Make room for a page of the sequence, if necessary by dropping its last page on the host."""
        pages = self._waiting[sequence].pages
        if self.bytes + self.page_bytes > self.room and pages:
            del pages[max(pages)]
            self.bytes -= self.page_bytes
        there = self.bytes + self.page_bytes <= self.room
        self.bytes += there * self.page_bytes
        return there

    def _read(self, ids: abc.Sequence[int]) -> NDArray[np.int8]:
        began = self._clock()
        try:
            pages = self._copier.copy_out(ids)
        finally:
            seconds = self._clock() - began
            self.seconds += seconds
        if seconds > 0:
            latest = pages.nbytes / seconds
            self.rate = latest if not self.rate else (1 - _LATEST) * self.rate + _LATEST * latest
        return pages
