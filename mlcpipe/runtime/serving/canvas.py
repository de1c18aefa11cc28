"""Blocks of text that are denoised: which proposed tokens stay (SDAR, Cheng et al. 2025, `low_confidence_dynamic`).

A block begins as masks. In each step the model proposes a token for every mask; those more probable than the threshold
stay. Where they are fewer than the step's share, the most probable ones stay, that many. With a threshold of 1 each
step keeps its share (`low_confidence_static`). A token that stays is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlcpipe.bundle.model_info import DiffusionInfo
from tir_schedules.step_layout import PAGE

_STEP_NUMBERS = 1 << 40  # random numbers of the positions in one step of their block


@dataclass(frozen=True)
class Denoising:
    """How a request's blocks are made: tokens of a block, most steps of it, the threshold, the token of a mask."""

    block: int
    steps: int
    threshold: float
    mask: int

    @classmethod
    def of(cls, info: DiffusionInfo) -> Denoising:
        """As the checkpoint says."""
        return cls(info.block, info.steps, info.threshold, info.mask)

    @property
    def pages(self) -> int:
        """Pages of a block, at least 1."""
        return max(1, self.block // PAGE)

    def begin(self, tokens: int) -> int:
        """The tokens of whole blocks among so many."""
        return tokens // self.block * self.block

    def end(self, tokens: int) -> int:
        """The end of the block that the next token is in."""
        return self.begin(tokens) + self.block

    def share(self, step: int) -> int:
        """Tokens of a block that a step decides, at least."""
        least, more = divmod(self.block, self.steps)
        return least + (step < more)


@dataclass
class Canvas:
    """The tokens of a block after the known ones, where they are decided; else the mask.

    `step`: steps that were computed.
    """

    how: Denoising
    tokens: list[int]
    step: int = 0
    masked: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._find()

    @classmethod
    def blank(cls, how: Denoising, known: int) -> Canvas:
        """The canvas after so many known tokens."""
        return cls(how, [how.mask] * (how.end(known) - known))

    def _find(self) -> None:
        self.masked = [place for place, token in enumerate(self.tokens) if token == self.how.mask]

    def number(self, position: int) -> int:
        """Which random number the token at a position takes in this step."""
        return self.step * _STEP_NUMBERS + position

    def keep(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """Decide tokens: a proposed one, and its probability, for each of `masked`; the first of equal ones."""
        order = sorted(range(len(proposed)), key=lambda one: -confidence[one])
        sure = sum(one > self.how.threshold for one in confidence)
        for one in order[: max(sure, self.how.share(self.step))]:
            self.tokens[self.masked[one]] = proposed[one]
        self.step += 1
        self._find()

    def finished(self, stop_ids: frozenset[int], most: int) -> bool:
        """Whether all tokens are decided, or the first `most`, or all up to one that ends the answer."""
        first = self.masked[0] if self.masked else len(self.tokens)
        return not self.masked or first >= most or any(token in stop_ids for token in self.tokens[:first])
