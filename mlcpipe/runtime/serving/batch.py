"""The integers of a forward: its rows, where their keys and values go, and which pages they attend to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcpipe.runtime.serving.sequence import Sequence
from mlcpipe.runtime.serving.step import DecodeRows, PrefillRows
from mlcpipe.vision.processors.picture import last_keys
from tir_schedules.step_layout import (
    ADAPTER_BEGIN,
    ADAPTER_END,
    HEADER,
    KEYS,
    LAST_KEY,
    PAGE,
    PLACE,
    POSITION,
    ROPE_LENGTH,
    ROPE_POSITION,
    ROW_BEGIN,
    ROWS,
    SEES,
    SEQUENCE,
    SEQUENCES,
    SLOT_OF_ROW,
    SLOT_READ,
    SLOT_WRITE,
    TABLE_BEGIN,
    TABLES,
)


class Span(NamedTuple):
    """Rows of one sequence in a forward, from position `begin` on."""

    sequence: Sequence
    begin: int
    rows: int


def decode_spans(rows: Iterable[DecodeRows]) -> list[Span]:
    """The rows of a decode forward."""
    return [Span(sequence, sequence.computed, len(tokens)) for sequence, tokens, _ in rows]


def prefill_spans(rows: Iterable[PrefillRows]) -> list[Span]:
    """The rows of a prefill forward."""
    return [Span(one.sequence, one.begin, one.rows) for one in rows]


_NONE = (-1, 0, 0, 0, False, False, False, False, False, False)


class StepBuffer:
    """The array that holds each step."""

    def __init__(self) -> None:
        self._data = np.zeros(1024, np.int32)
        self._shape = _NONE
        self._parts: dict[int, NDArray[np.int32]] = {}

    def fill(self, spans: list[Span], *, ahead: bool = False) -> NDArray[np.int32]:
        """The step of these rows, valid until the next call. It grows by powers of two, so that few launches differ.

        `ahead`: rows of a picture see each other.
        """
        rows, entries = sum(span.rows for span in spans), sum(len(span.sequence.tables[0]) for span in spans)
        groups, slots = len(spans[0].sequence.tables), spans[0].sequence.next_slot >= 0
        drafts = slots and any(span.sequence.row_slots for span in spans)
        adapters = any(span.sequence.request.adapter for span in spans)
        moved = any(span.sequence.moved is not None for span in spans)
        blocks = spans[0].sequence.request.denoising is not None
        shape = len(spans), rows, entries, groups, slots, drafts, adapters, moved, blocks, ahead
        if shape != self._shape:
            self._shape = _NONE  # in case Ctrl-C interrupts what follows
            self._lay_out(*shape)
            self._shape = shape
        parts = self._parts
        row = entry = 0
        for i, span in enumerate(spans):
            _fill_rows(parts, span, i, row, entry)
            row += span.rows
            entry += len(span.sequence.tables[0])
            parts[ROW_BEGIN][i + 1], parts[TABLE_BEGIN][i + 1] = row, entry
            parts[KEYS][i] = span.begin + span.rows
            if slots:
                parts[SLOT_READ][i], parts[SLOT_WRITE][i] = span.sequence.slot, span.sequence.next_slot
            if drafts:
                slots_of_rows = span.sequence.row_slots[: span.rows - 1]
                parts[SLOT_OF_ROW][row - span.rows : row] = slots_of_rows + [-1] * (span.rows - len(slots_of_rows))
            if ahead:
                parts[LAST_KEY][row - span.rows : row] = last_keys(span.sequence.tokens, span.begin, span.rows)
        return self._data

    def _lay_out(
        self,
        count: int,
        rows: int,
        entries: int,
        groups: int,
        slots: bool,
        drafts: bool,
        adapters: bool,
        moved: bool,
        blocks: bool,
        ahead: bool,
    ) -> None:
        """Write the header of `count` sequences, `rows` rows and `entries` pages of a group, and set the parts.

        Header, then: position[n], place[n], rope_length[n], sequence[n], row_begin[S + 1], keys[S], table_begin[S + 1],
        and the table[t] of each group. With states in slots: slot_read[S], slot_write[S], and with drafts
        slot_of_row[n]. Where a row has an adapter: adapter_begin[n], adapter_end[n]. Where RoPE has rows elsewhere:
        rope_position[3, n]. With blocks: sees[n]. With `ahead`: last_key[n].
        """
        sizes = {POSITION: rows, PLACE: rows, ROPE_LENGTH: rows, SEQUENCE: rows}
        sizes |= {ROW_BEGIN: count + 1, KEYS: count, TABLE_BEGIN: count + 1}
        sizes |= {TABLES + group: entries for group in range(groups)}
        sizes |= {SLOT_READ: count, SLOT_WRITE: count} if slots else {}
        sizes |= {SLOT_OF_ROW: rows} if drafts else {}
        sizes |= {ADAPTER_BEGIN: rows, ADAPTER_END: rows} if adapters else {}
        sizes |= {ROPE_POSITION: 3 * rows} if moved else {}
        sizes |= {SEES: rows} if blocks else {}
        sizes |= {LAST_KEY: rows} if ahead else {}
        if (size := HEADER + sum(sizes.values())) > len(self._data):
            self._data = np.zeros(1 << (size - 1).bit_length(), np.int32)
        header = self._data[:HEADER]
        header[:] = 0
        header[SEQUENCES], header[ROWS] = count, rows
        at, self._parts = HEADER, {}
        for name, size in sizes.items():
            header[name], self._parts[name] = at, self._data[at : at + size]
            at += size
        self._parts[ROW_BEGIN][0] = self._parts[TABLE_BEGIN][0] = 0


def _fill_rows(parts: dict[int, NDArray[np.int32]], span: Span, index: int, row: int, entry: int) -> None:
    """Fill the parts of sequence number `index`, whose rows begin at `row` and whose pages at `entry`."""
    sequence, begin, count = span
    if ADAPTER_BEGIN in parts:
        adapter = sequence.request.adapter
        blocks = (0, 0) if adapter is None else (adapter.begin, adapter.end)
        parts[ADAPTER_BEGIN][row : row + count], parts[ADAPTER_END][row : row + count] = blocks
    if ROPE_POSITION in parts:
        parts[ROPE_POSITION].reshape(3, -1)[:, row : row + count] = sequence.rope_positions(begin, count)
    for group, table in enumerate(sequence.tables):
        parts[TABLES + group][entry : entry + len(table)] = table
    if SEES in parts:
        block = sequence.request.denoising.sees if sequence.request.denoising is not None else 1
        ends = (np.arange(begin, begin + count, dtype=np.int32) // block + 1) * block
        parts[SEES][row : row + count] = np.minimum(ends, begin + count)
    table = sequence.tables[0]
    if count == 1:
        parts[POSITION][row] = begin
        parts[SEQUENCE][row] = index
        parts[ROPE_LENGTH][row] = sequence.rope_length(begin)
        parts[PLACE][row] = table[begin // PAGE] * PAGE + begin % PAGE
        return
    end = row + count
    positions = np.arange(begin, begin + count, dtype=np.int32)
    parts[POSITION][row:end] = positions
    parts[SEQUENCE][row:end] = index
    parts[ROPE_LENGTH][row:end] = np.maximum(positions + 1, sequence.decode_from)
    pages = parts[TABLES][entry : entry + len(table)]
    parts[PLACE][row:end] = pages[positions // PAGE] * PAGE + positions % PAGE
