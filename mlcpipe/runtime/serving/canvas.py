"""Blocks of text that are denoised: which proposed tokens stay (SDAR, Cheng et al. 2025, `low_confidence_dynamic`).

A block begins as masks. In each step the model proposes a token for every mask; those more probable than the threshold
stay. Where they are fewer than the step's share, the most probable ones stay, that many. With a threshold of 1 each
step keeps its share (`low_confidence_static`). A token that stays is never changed.

With an editing threshold (LLaDA 2.1, Bie et al. 2026) each step also proposes tokens for the decided places of the
answer, and another token that is more probable than this replaces the decided one. The block is done after a step
without masks that changes nothing, or after `post_steps` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlcpipe.bundle.model_info import DiffusionInfo
from tir_schedules.step_layout import PAGE

STEP_NUMBERS = 1 << 40  # random numbers of the positions in one step of their block


@dataclass(frozen=True)
class Denoising:
    """How a request's blocks are made: tokens of a block, most steps of it, the threshold, the token of a mask.

    `editing`: the threshold of edits, or None; `post_steps`: most steps after a block's last mask, for edits alone.
    """

    block: int
    steps: int
    threshold: float
    mask: int
    editing: float | None = None
    post_steps: int = 0

    keeps = True  # keys of finished blocks stay

    @classmethod
    def of(cls, info: DiffusionInfo) -> Denoising:
        """As the checkpoint says."""
        return cls(info.block, info.steps, info.threshold, info.mask, info.editing_threshold, info.max_post_steps)

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

    @property
    def sees(self) -> int:
        """Tokens that see each other: all up to the next multiple of this."""
        return self.block

    def room(self, context: int) -> int:
        """Most tokens of prompt and answer in a context: whole blocks."""
        return self.begin(context)

    def most(self, max_tokens: int) -> int:
        """Most tokens of the answer to a request with such a limit."""
        return max_tokens

    def blank(self, known: int) -> Canvas:
        """The canvas after so many known tokens, before the first step."""
        return Canvas.blank(self, known)

    def share(self, step: int) -> int:
        """Tokens of a block that a step decides, at least."""
        least, more = divmod(self.block, self.steps)
        return least + (step < more)


@dataclass
class Canvas:
    """The tokens of a block after the known ones, where they are decided; else the mask.

    `step`: steps that were computed, `after` of them without masks. `masked`: the places of masks, `asked`: those that
    the next step proposes tokens for.
    """

    how: Denoising
    tokens: list[int]
    step: int = 0
    after: int = 0
    masked: list[int] = field(init=False)
    asked: list[int] = field(init=False)
    _changed: bool = field(default=True, init=False)  # by the last step

    def __post_init__(self) -> None:
        self._find()

    @classmethod
    def blank(cls, how: Denoising, known: int) -> Canvas:
        """The canvas after so many known tokens."""
        return cls(how, [how.mask] * (how.end(known) - known))

    def _find(self) -> None:
        self.masked = [place for place, token in enumerate(self.tokens) if token == self.how.mask]
        self.asked = self.masked if self.how.editing is None else [*range(len(self.tokens))]

    def number(self, position: int) -> int:
        """Which random number the token at a position takes in this step."""
        return self.step * STEP_NUMBERS + position

    def keep(self, proposed: Sequence[int], confidence: Sequence[float]) -> None:
        """Decide tokens: a proposed one, and its probability, for each of `asked`; the first of equal ones."""
        asked, mask = self.asked, self.how.mask
        masks = [one for one, place in enumerate(asked) if self.tokens[place] == mask]
        order = sorted(masks, key=lambda one: -confidence[one])
        sure = sum(confidence[one] > self.how.threshold for one in masks)
        changed = order[: max(sure, self.how.share(self.step))]
        edits = []
        if self.how.editing is not None:
            edits = [one for one, place in enumerate(asked) if self.tokens[place] not in (mask, proposed[one])]
            edits = [one for one in edits if confidence[one] > self.how.editing]
        for one in (*changed, *edits):
            self.tokens[asked[one]] = proposed[one]
        self.step, self.after, self._changed = self.step + 1, self.after + (not masks), bool(masks or edits)
        self._find()

    @property
    def shift(self) -> int:
        """How many rows before its own a place has its logits in."""
        return 0

    def take(self, stop_ids: frozenset[int], most: int) -> list[int]:
        """Remove all tokens if the canvas is `finished` -> these."""
        taken: list[int] = []
        if self.finished(stop_ids, most):
            taken, self.tokens = self.tokens, []
        return taken

    def finished(self, stop_ids: frozenset[int], most: int) -> bool:
        """Whether all tokens are decided, or the first `most`, or all up to one that ends the answer.

        With edits: whether none of them changes any more.
        """
        if self.how.editing is not None:
            return not self.masked and (not self._changed or self.after >= self.how.post_steps)
        first = self.masked[0] if self.masked else len(self.tokens)
        return not self.masked or first >= most or any(token in stop_ids for token in self.tokens[:first])
