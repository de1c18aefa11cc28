"""Where the keys of rows are, by TVM's arguments or a step's integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr
from tir_schedules.gpu.attention.pages import Pages
from tir_schedules.gpu.kernel import keep
from tir_schedules.step import Step


class Located(Protocol):
    """The keys of each query of decode: `scores.Cached`, whose b is a sequence with one query, or `RowKeys`."""

    @property
    def pages(self) -> Pages: ...

    def keys(self, b: Expr, /) -> Expr:
        """Keys before query b, its own included, if they are in pages already."""

    def oldest(self, b: Expr, row: Expr, window: int, /) -> Expr:
        """The first key that query `row` sees, of sequence b."""

    def table(self, b: Expr, /) -> Callable[[Expr], Expr]:
        """The page of tokens 16 i ... 16 i + 15 of b, by i."""


@dataclass(frozen=True)
class RowKeys:
    """The keys of each row of a step: those up to its own position."""

    step: Step
    pages: Pages

    def keys(self, row: Expr) -> Expr:
        return keep(self.step.position(row) + 1)

    def oldest(self, b: Expr, row: Expr, window: int) -> Expr:
        return keep(I.max(self.step.position(row) - (window - 1), 0))

    def table(self, row: Expr) -> Callable[[Expr], Expr]:
        return page_table(self.step, keep(self.step.sequence(row)))


def page_table(step: Step, sequence: Expr) -> Callable[[Expr], Expr]:
    """The page of tokens 16 i ... 16 i + 15 of a sequence of a step, by i."""
    begin = keep(step.table(sequence))
    return lambda i: step.integers[begin + i]
