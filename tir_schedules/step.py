"""How kernels read the integers of a step, which `step_layout.py` describes."""

from __future__ import annotations

from dataclasses import dataclass

from tir_schedules.builder import Buffer, Expr, Tensor
from tir_schedules.step_layout import (
    ADAPTER_BEGIN,
    ADAPTER_END,
    KEYS,
    LAST_KEY,
    PAGE,
    PLACE,
    POSITION,
    ROW_BEGIN,
    SEES,
    SEQUENCE,
    SEQUENCES,
    SLOT_OF_ROW,
    SLOT_READ,
    SLOT_WRITE,
    TABLE_BEGIN,
    TABLES,
)

# The functions that attend by these integers: a rule may make them again with other knobs.
ATTEND = ("attend_few", "attend_many")


@dataclass(frozen=True)
class Step:
    """The integers as a kernel reads them. `group`: of the pages that the kernel gets.

    `rows`: which rows of the step the kernel's rows are; None: the same.
    """

    integers: Buffer
    group: int
    rows: Buffer | None = None

    def _at(self, array: int, i: Expr) -> Expr:
        return self.integers[self.integers[array] + i]

    @property
    def sequences(self) -> Expr:
        """S, the sequences of the step."""
        return self.integers[SEQUENCES]

    def position(self, row: Expr) -> Expr:
        """The position of a row in its sequence."""
        return self._at(POSITION, row if self.rows is None else self.rows[row])

    def last_key(self, row: Expr) -> Expr:
        """The position of the last key that a row of a prompt with pictures sees."""
        return self._at(LAST_KEY, row)

    def sequence(self, row: Expr) -> Expr:
        """The sequence of a row."""
        return self._at(SEQUENCE, row if self.rows is None else self.rows[row])

    def row_begin(self, s: Expr) -> Expr:
        """The first row of sequence s; of S, the number of rows."""
        return self._at(ROW_BEGIN, s)

    def keys(self, s: Expr) -> Expr:
        """The keys of sequence s, with those of this step."""
        return self._at(KEYS, s)

    def sees(self, row: Expr) -> Expr:
        """How many keys of its sequence a row sees. Only where `Heads.ahead` says so."""
        return self._at(SEES, row)

    def page(self, s: Expr, i: Expr) -> Expr:
        """The page of tokens 16 i ... 16 i + 15 of sequence s."""
        return self._at(TABLES + self.group, self._at(TABLE_BEGIN, s) + i)

    def table(self, s: Expr) -> Expr:
        """Where the page ids of sequence s begin in the integers."""
        return self.integers[TABLES + self.group] + self._at(TABLE_BEGIN, s)

    def stores(self, row: Expr) -> Expr:
        """Whether the K and V of a row go to a page."""
        return self._at(PLACE, row) >= 0

    def place(self, row: Expr) -> tuple[Expr, Expr]:
        """The page and the place in it for the K and V of a row that `stores`."""
        if not self.group:
            return self._at(PLACE, row) // PAGE, self._at(PLACE, row) % PAGE
        return self.page(self.sequence(row), self.position(row) // PAGE), self.position(row) % PAGE

    def slot_read(self, s: Expr) -> Expr:
        """The slot with the states of sequence s before this step, -1: zeros."""
        return self._at(SLOT_READ, s)

    def slot_write(self, s: Expr) -> Expr:
        """The slot for the states of sequence s after this step, -1: none."""
        return self._at(SLOT_WRITE, s)

    @property
    def has_slots_of_rows(self) -> Expr:
        """Whether states after rows before a sequence's last are wanted."""
        return self.integers[SLOT_OF_ROW] > 0

    def slot_of_row(self, row: Expr) -> Expr:
        """The slot for the states after a row before its sequence's last, -1: none. Only where `has_slots_of_rows`."""
        return self._at(SLOT_OF_ROW, row)

    def adapter_begin(self, row: Expr) -> Expr:
        """The first block of a row's adapter."""
        return self._at(ADAPTER_BEGIN, row)

    def adapter_end(self, row: Expr) -> Expr:
        """The block after the last one of a row's adapter; the first one where it has none."""
        return self._at(ADAPTER_END, row)


def step_argument(size: Expr, group: int = 0) -> Tensor:
    """The tensor i32[size], as `Step` for pages of a group."""
    return Tensor((size,), "int32", wrap=lambda integers: Step(integers, group))
