"""What one step computes, and its results."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

from mlcpipe.runtime.serving.canvas import Canvas
from mlcpipe.runtime.serving.cost_model import Load
from mlcpipe.runtime.serving.page_pool import PageCopy
from mlcpipe.runtime.serving.sequence import Finish, Sequence
from mlcpipe.runtime.serving.whole_answer import WholeCanvas

NOT_DRAWN = -1  # instead of a token: the row is computed again


class DecodeRows(NamedTuple):
    """Rows with decode's arithmetic: the last sampled token and a draft, or tokens of an answer that is recomputed.

    They follow the computed tokens of the sequence. The last `logits` of them give logits.
    """

    sequence: Sequence
    tokens: list[int]
    logits: int


class PrefillRows(NamedTuple):
    """Rows with prefill's arithmetic: `rows` tokens from `begin` on.

    Where the prompt ends, a token is sampled from the last row for each of `drawing`: the sequence itself, then those
    that waited with the same prompt and start from its pages.

    The last rows are those of `canvas`, if there is one: a token is proposed for each of its places in `asked`.
    """

    sequence: Sequence
    begin: int
    rows: int
    drawing: tuple[Sequence, ...] = ()
    canvas: Canvas | WholeCanvas | None = None

    @property
    def tokens(self) -> list[int]:
        """Of the rows."""
        if self.canvas is None:
            return self.sequence.tokens[self.begin : self.begin + self.rows]
        known = self.sequence.tokens[self.begin :]
        return known + self.canvas.tokens

    @property
    def wanted(self) -> list[int]:
        """The rows that give logits, counted from the first one."""
        if self.canvas is None:
            return [self.rows - 1] * len(self.drawing)
        return [self.rows - len(self.canvas.tokens) + place - self.canvas.shift for place in self.canvas.asked]


class Event(NamedTuple):
    """New tokens of a sequence, and why it ended if it did."""

    sequence: Sequence
    tokens: list[int]
    finish: Finish | None


@dataclass
class Step:
    """First `copies`, then the forward of `decode`, then of `prefill`; then a token is sampled per row with logits.

    The tokens, or NOT_DRAWN, go to `Scheduler.settle` in the order of rows: decode, prefill.
    """

    planned: float
    decode: list[DecodeRows] = field(default_factory=list)
    prefill: list[PrefillRows] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def load(self) -> Load:
        """For the cost model: row i of a sequence attends i + 1 keys."""
        decode_keys = decode = prefill_keys = prefill = 0
        for rows in self.decode:
            count = len(rows.tokens)
            decode += count
            decode_keys += count * rows.sequence.computed + count * (count + 1) // 2
        for _, begin, count, _, _ in self.prefill:
            prefill += count
            prefill_keys += count * begin + count * (count + 1) // 2
        return Load(decode, decode_keys, prefill, prefill_keys)

    @property
    def draws(self) -> int:
        """Rows with logits."""
        return sum(rows.logits for rows in self.decode) + sum(len(rows.wanted) for rows in self.prefill)


def accepted(draft: abc.Sequence[int], drawn: abc.Sequence[int]) -> list[int]:
    """The accepted tokens: each sampled one, as long as the drafted token before it equals the sampled one."""
    kept = list(drawn[:1])
    for proposed, token in zip(draft, drawn[1:]):
        if proposed != kept[-1]:
            break
        kept.append(token)
    return kept
