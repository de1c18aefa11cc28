"""Whole answers that are denoised: which masks each step decides (LLaDA, Nie et al. 2025; Dream, Ye et al. 2025).

All tokens of prompt and answer see each other, so each step computes all of them, and no keys stay. A token that is
decided is never changed: those before the first mask can be sent. The orders in which masks are decided are those of
the published programs, by names of theirs:

- Dream's `origin` decides each mask at random, with the probability that its schedule gives the step; `maskgit_plus`,
  `topk_margin` and `entropy` decide as many as that is of all masks, those where the proposed token is most probable,
  or furthest ahead of the next one, or where the entropy is least. With a temperature the order is drawn.
- LLaDA decides as many masks in each step of a block, one block after the other: with `low_confidence` those where the
  proposed token is most probable, with `random` any.

Steps that decide nothing are not computed: nothing that they see differs from the step before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mlcpipe.bundle.model_info import Order, WholeAnswerInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.random_numbers import Uniforms
from mlcpipe.runtime.serving.canvas import STEP_NUMBERS

DREAM: tuple[Order, ...] = ("origin", "maskgit_plus", "topk_margin", "entropy")
_AT_RANDOM: tuple[Order, ...] = ("origin", "random")  # whatever tokens are proposed
MEASURES: Mapping[str, int] = {
    "maskgit_plus": 0,
    "low_confidence": 1,
    "topk_margin": 2,
    "entropy": 3,
}  # of `sample_with_measure`; 0 where none counts
_SEES = 1 << 30  # more tokens than any text has
_ORDER_STREAM = 1  # of random numbers; tokens are drawn with those of stream 0


@dataclass(frozen=True)
class WholeAnswer:
    """How a request's answer is made: tokens of the prompt and of the answer, those of a block, steps of a block.

    `order_temperature`: of the order; 0 takes the first masks. `seed`: of the orders that are drawn.
    """

    mask: int
    prompt: int
    answer: int
    block: int
    steps: int
    order: Order
    order_temperature: float = 0.0
    shifted: bool = False
    eps: float = 1e-3
    seed: int = 0

    keeps = False  # no keys of tokens stay
    pages = 1
    sees = _SEES

    @classmethod
    def of(cls, info: WholeAnswerInfo) -> WholeAnswer:
        """That of a text without an answer, for its logits."""
        return cls(info.mask, 0, 0, 1, 1, info.orders[0])

    @property
    def by_schedule(self) -> bool:
        """Whether a step decides a part of the masks that are left (Dream), else as many as other steps."""
        return self.order in DREAM

    def in_steps(self, block: int, steps: int | None) -> WholeAnswer:
        """With blocks of so many tokens, and so many steps of all blocks, or as many as tokens.

        Raises UsageError for steps that blocks do not share evenly, as the program does.
        """
        blocks = -(-self.answer // block)
        if steps is not None and steps % blocks:
            raise UsageError("steps", expected=f"a multiple of the {blocks} blocks of the answer", found=steps)
        return replace(self, block=block, steps=block if steps is None else steps // blocks)

    def begin(self, tokens: int) -> int:
        """The tokens among so many whose keys stay."""
        return 0

    def end(self, tokens: int) -> int:
        """The tokens of prompt and answer."""
        return self.prompt + self.answer

    def room(self, context: int) -> int:
        """Most tokens of prompt and answer in a context."""
        return context

    def most(self, max_tokens: int) -> int:
        """Most tokens of the answer to a request with such a limit."""
        return self.answer

    def blank(self, known: int) -> WholeCanvas:
        """The canvas after so many known tokens, before the first step."""
        return WholeCanvas(self, [self.mask] * (self.end(known) - known))

    def part(self, step: int) -> np.float32:
        """The part of the masks that are left which a step of Dream's schedule decides: 1 - s / t, float32.

        t and s are torch's `linspace(1, eps, steps + 1)` at the step and after it: float32 sums, rounded once, from the
        nearer end. The last step decides all.
        """
        part: np.float32 = np.float32(1)
        if step == self.steps - 1:
            return part
        end, each = float(np.float32(self.eps)), float((np.float32(self.eps) - np.float32(1)) / np.float32(self.steps))
        half = (self.steps + 1) // 2
        t, s = (np.float32(1 + each * i if i < half else end - each * (self.steps - i)) for i in (step, step + 1))
        part -= s / t
        return part


@dataclass
class WholeCanvas:
    """The tokens of an answer that are not sent: decided ones, else the mask.

    `sent`: tokens before them. `step`: steps of all blocks before the next one, also those that decide nothing.
    `asked`: the places that the next step proposes tokens for; none once all tokens are decided.
    """

    how: WholeAnswer
    tokens: list[int]
    sent: int = 0
    step: int = 0
    asked: list[int] = field(init=False)
    _count: int = field(init=False, default=0)  # of masks that the next step decides

    def __post_init__(self) -> None:
        self._numbers = Uniforms(self.how.seed, _ORDER_STREAM)
        self._find()

    @property
    def shift(self) -> int:
        """How many rows before its own a place has its logits in."""
        return int(self.how.shifted)

    def number(self, position: int) -> int:
        """Which random number the token at a position takes in this step."""
        return self.step * STEP_NUMBERS + position

    def _find(self) -> None:
        """Go to the next step that decides anything."""
        how, self.asked = self.how, []
        while self.step < how.steps * -(-how.answer // how.block):
            block, step = divmod(self.step, how.steps)
            first, end = block * how.block, min((block + 1) * how.block, how.answer)
            places = range(max(0, first - self.sent), max(0, end - self.sent))
            masks = [place for place in places if self.tokens[place] == how.mask]
            if how.order == "origin":
                part = how.part(step)
                self.asked = [place for place in masks if np.float32(self._random(place)) < part]
                self._count = len(self.asked)
            elif how.by_schedule:
                self._count, self.asked = int(np.float32(len(masks)) * how.part(step)), masks
            else:
                least, more = divmod(end - first, how.steps)
                self._count, self.asked = min(len(masks), least + (step < more)), masks
                if how.order == "random":
                    drawn = sorted(masks, key=lambda place: -self._random(place))[: self._count]
                    self.asked = sorted(drawn)
            if self._count:
                return
            self.step, self.asked = self.step + 1, []

    def _random(self, place: int) -> float:
        """The random number of a place in the order of this step."""
        return self._numbers.at(self.number(self.how.prompt + self.sent + place))

    def keep(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """Decide tokens: a proposed one for each of `asked`, and the measure of its row; the first of equal ones."""
        keys = [0.0] * len(proposed) if self.how.order in _AT_RANDOM else [*confidence]
        if self.how.order_temperature and self.how.order not in _AT_RANDOM:  # Gumbel's: Kool et al. 2019
            keys = [
                one / self.how.order_temperature - math.log(-math.log(max(self._random(place), 2.0**-25)))
                for one, place in zip(keys, self.asked)
            ]
        for one in sorted(range(len(keys)), key=lambda one: -keys[one])[: self._count]:
            self.tokens[self.asked[one]] = proposed[one]
        self.step += 1
        self._find()

    def take(self, stop_ids: frozenset[int], most: int) -> list[int]:
        """Remove the tokens before the first mask -> these."""
        count = next((place for place, token in enumerate(self.tokens) if token == self.how.mask), len(self.tokens))
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        self.sent += count
        self.asked = [place - count for place in self.asked]
        return taken
