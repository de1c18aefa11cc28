"""Requests as the scheduler takes them, and the sequences that answer them."""

from __future__ import annotations

import enum
from array import array
from collections import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import CacheMiss
from mlcpipe.runtime.serving.canvas import Canvas, Denoising
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.drafting import Drafter
from mlcpipe.runtime.serving.picture_positions import moved_by
from mlcpipe.runtime.serving.prefix_node import Checkpoint, Node
from mlcpipe.runtime.serving.whole_answer import WholeAnswer, WholeCanvas
from tir_schedules.step_layout import PAGE

if TYPE_CHECKING:
    from mlcpipe.runtime.serving.adapters import Adapter
    from mlcpipe.vision.processors.picture import Picture

PRIORITIES = (-1, 0, 1)
_ALL_DECODE = (1 << PAGE) - 1


@dataclass(frozen=True)
class ScheduledRequest:
    """A prompt, and how to continue it.

    tokens         ids of the prompt, one or more; negative ones stand for rows of `pictures`
    max_tokens     of the answer, >= 1
    params         how tokens are sampled; for the executor, nothing here reads it
    stop_ids       ids that end the answer, which includes the one that ended it
    priority       -1, 0 or 1; a class that may preempt lower ones
    deadline_s     when the answer ends as it is; on the clock of `arrival`
    namespace      pages are shared inside it only, and among requests with one adapter
    arrival        seconds on the scheduler's clock
    keep           the pages of the prompt stay after the answer, for prompts with the same beginning
    deterministic  take only pages whose tokens were computed as this request would compute them. Others may differ in
                   bits: prefill and decode differ in arithmetic
    drafter        proposes the next tokens of the answer, for this request alone
    adapter        of the model's projections, or None
    shifts         when the context is full, the answer continues without the tokens that are dropped
    ready          whether its next token can be sampled; steps leave the sequence out until then
    redraws        the row of a token may be computed again, because its mask came late or a step was interrupted
    pictures       those whose rows are among the tokens, by number (`mlcpipe.vision.processors.picture`)
    parks          after the answer its pages stay until others need them, also the last one, for the next turn
    scored         the forwards of the prompt give logits of all its rows; its namespace is its own
    denoising      how blocks of the answer are made, or all of it, or None where one token follows the other
    borders        the ends of pages before which its messages end, in order: see `message_borders.py`

    Raises UsageError.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    params: Any = None
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    deadline_s: float | None = None
    namespace: Hashable = ""
    arrival: float = 0.0
    keep: bool = False
    deterministic: bool = False
    drafter: Drafter | None = None
    adapter: Adapter | None = None
    shifts: bool = False
    ready: Callable[[], bool] = lambda: True
    redraws: bool = False
    parks: bool = False
    scored: bool = False
    pictures: abc.Mapping[int, Picture] = field(default_factory=dict)
    denoising: Denoising | WholeAnswer | None = None
    borders: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UsageError("the prompt", expected="at least one token", found="none")
        if self.max_tokens < 1:
            raise UsageError("max_tokens", expected="at least 1", found=self.max_tokens)
        if self.priority not in PRIORITIES:
            raise UsageError("priority", expected="-1, 0 or 1", found=self.priority)


class State(enum.Enum):
    """WAITING has no pages. PREFILLING has tokens to compute before its next one is sampled, RUNNING only its last."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    ENDED = "ended"


class Finish(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Sequence:
    """A request and its answer so far.

    tokens      prompt and answer, without those that are dropped; the last sampled one is not computed yet
    dropped     tokens that the context has lost
    decode_from tokens before it are computed as prefill rows, those from it on as decode rows: the length of the
                prompt, or of the text that was recomputed when RoPE's frequencies changed or the context was shifted
    computed    number of tokens whose keys and values are in pages
    tables      by group of pages, the page of each 16 tokens; -1 where a window has left them behind
    kept_from   by group, the first page that has not been left behind
    slot        where the states after the computed tokens are, -1: before the first token, or a model without slots
    next_slot   where the running step writes them, -1: there is none
    row_slots   where it writes those after each row of a draft but the last
    checkpoint  the last one that this sequence left in the prefix tree
    node        the deepest node of the prefix tree that this sequence uses, at depth `shared`
    cached      tokens of the prompt that were found when the request was first admitted, and `miss`, why no more
    draft       proposed tokens after the last one
    moved       where RoPE has the tokens up to the last one of a picture, i32[3, n]; None: where they are
    delta       what it adds to the positions of those after them
    canvas      the tokens after the known ones in a block, or an answer, that is denoised
    passed_s    how long shorter prompts were served before this one, less how long it was served since
    leader      the sequence that computes the beginning of this one, up to `leader_tokens`
    taken_page  the page in which a parked sequence ended that this one continues, `taken_mask` its `decode_mask`, and
                `taken_from` the number of tokens that it had
    """

    id: int
    request: ScheduledRequest
    tables: list[array[int]]
    kept_from: list[int]
    tokens: list[int] = field(init=False)
    decode_from: int = field(init=False)
    state: State = State.WAITING
    computed: int = 0
    slot: int = -1
    next_slot: int = -1
    row_slots: list[int] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    node: Node | None = None
    shared: int = 0
    cached: int | None = None
    miss: CacheMiss | None = None
    draft: list[int] = field(default_factory=list)
    moved: NDArray[np.int32] | None = field(init=False)
    delta: int = field(init=False)
    canvas: Canvas | WholeCanvas | None = None
    dropped: int = 0
    preemptions: int = 0
    passed_s: float = 0.0
    leader: Sequence | None = None
    leader_tokens: int = 0
    taken_page: int = -1
    taken_mask: int = 0
    taken_from: int = 0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.decode_from = len(self.tokens)
        self.moved, self.delta = moved_by(self.tokens, self.request.pictures)

    @property
    def left(self) -> int:
        """Number of tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> int:
        """Number of sampled tokens of the answer."""
        return self.dropped + len(self.tokens) - len(self.request.tokens)

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: the higher priority first, then the earlier arrival."""
        return (-self.request.priority, self.request.arrival, self.id)

    def decode_mask(self, page: int) -> int:
        """Bit i: token i of this page is computed as a decode row."""
        if self.request.denoising is not None:
            return 0
        own = _ALL_DECODE << max(0, self.decode_from - page * PAGE) & _ALL_DECODE
        return own | self.taken_mask if page == self.taken_page else own

    def rope_length(self, position: int) -> int:
        """The length that RoPE's frequencies at this position follow: of the whole prompt, or up to the token."""
        return max(self.decode_from, position + 1)

    def rope_positions(self, begin: int, count: int) -> NDArray[np.int32]:
        """Where RoPE has tokens from `begin` on: time, row and column i32[3, count], or i32[count] if all are equal."""
        known, first = self.moved, begin + self.delta
        plain: NDArray[np.int32] = np.arange(first, first + count, dtype=np.int32)
        if known is None or begin >= known.shape[1]:
            return plain
        part = known[:, begin : begin + count]
        rest = np.broadcast_to(plain[part.shape[1] :], (3, count - part.shape[1]))
        return np.concatenate([part, rest], axis=1)

    def push(self, tokens: abc.Sequence[int], context: int) -> list[int]:
        """Append sampled tokens, up to one that ends the answer, which sets `finish` -> those appended."""
        request, pushed = self.request, list[int]()
        for token in tokens:
            self.tokens.append(token)
            pushed.append(token)
            if token in request.stop_ids:
                self.finish = Finish.STOP
            elif self.answer >= request.max_tokens or (len(self.tokens) >= context and not request.shifts):
                self.finish = Finish.LENGTH
            if self.finish is not None:
                break
        return pushed

    def shift(self, context: int) -> bool:
        """Drop tokens if the context is full; whether it was. The caller must recompute the remaining tokens."""
        dropped = tokens_to_drop(len(self.tokens), context)
        if dropped:
            self.tokens = without_dropped(self.tokens, dropped)
            self.moved, self.delta = moved_by(self.tokens, self.request.pictures)
            self.dropped += dropped
            if self.request.drafter is not None:
                self.request.drafter.restart()
        return bool(dropped)
