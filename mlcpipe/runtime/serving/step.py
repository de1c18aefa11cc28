"""What one step computes, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import NamedTuple

from mlcpipe.runtime.serving.cost_model import Load
from mlcpipe.runtime.serving.page_pool import PageCopy
from mlcpipe.runtime.serving.sequence import Finish, Sequence

NOT_DRAWN = -1  # in the place of a token: the row is computed again


class FewRows(NamedTuple):
    """Rows with decode's arithmetic: the token drawn last and a draft, or tokens of an answer that is computed anew.

    They follow the computed tokens of the sequence. Logits are wanted of the last `logits` of them.
    """

    sequence: Sequence
    tokens: list[int]
    logits: int


class ManyRows(NamedTuple):
    """Rows with the arithmetic of prompts: `rows` tokens from `begin` on.

    Where the prompt ends, a token is drawn from the last row for each of `drawing`: for the sequence itself, then for
    those that waited with the same prompt and start from its pages.
    """

    sequence: Sequence
    begin: int
    rows: int
    drawing: tuple[Sequence, ...] = ()


class Event(NamedTuple):
    """Tokens that a sequence got, and why it ended if it did."""

    sequence: Sequence
    tokens: list[int]
    finish: Finish | None


@dataclass
class Step:
    """First `copies`, then the forward of `few`, then that of `many`; then a token is drawn for each row with logits.

    The tokens, or NOT_DRAWN, go to `Scheduler.settle` in the order of rows: few, many.
    """

    planned: float
    few: list[FewRows] = field(default_factory=list)
    many: list[ManyRows] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def load(self) -> Load:
        """For the cost model: row i of a sequence attends i + 1 keys."""
        few_keys = few = many_keys = many = 0
        for rows in self.few:
            count = len(rows.tokens)
            few += count
            few_keys += count * rows.sequence.computed + count * (count + 1) // 2
        for _, begin, count, _ in self.many:
            many += count
            many_keys += count * begin + count * (count + 1) // 2
        return Load(few, few_keys, many, many_keys)

    @property
    def draws(self) -> int:
        """Rows with logits."""
        return sum(rows.logits for rows in self.few) + sum(len(rows.drawing) for rows in self.many)


def accepted(draft: Many[int], drawn: Many[int]) -> list[int]:
    """The tokens that stand: each drawn one, as long as the draft before it was what had been drawn."""
    kept = list(drawn[:1])
    for proposed, token in zip(draft, drawn[1:]):
        if proposed != kept[-1]:
            break
        kept.append(token)
    return kept
