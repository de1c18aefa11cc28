"""What a client asks for, and how far its answer is."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.drafting import Drafter
from tir_schedules.step_layout import PAGE

if TYPE_CHECKING:
    from mlcpipe.runtime.serving.adapters import Adapter
    from mlcpipe.runtime.serving.prefix_tree import Checkpoint, Node

PRIORITIES = (-1, 0, 1)
_ALL_FEW = (1 << PAGE) - 1


@dataclass(frozen=True)
class Request:
    """A prompt, and how to go on from it.

    tokens         ids of the prompt, one or more
    max_tokens     of the answer, >= 1
    params         how tokens are drawn; for the executor, nothing here reads it
    stop_ids       ids that end the answer; the one that ended it is part of it
    priority       -1, 0 or 1; a class that may take pages and places from a lower one
    deadline_s     when the answer ends with what there is; on the clock of `arrival`
    namespace      pages are shared inside it only, and among requests with one adapter
    arrival        seconds on any clock, the one that the scheduler is called with
    keep           the pages of the prompt stay when the answer has ended, for those who begin alike
    deterministic  take only pages whose tokens were computed as this request would compute them. Others may differ by
                   the arithmetic of prompts against that of answers
    drafter        proposes the next tokens of the answer, for this request alone
    adapter        of the model's projections, or None
    shifts         the answer goes on where the context is full, without what is dropped
    ready          whether its next token can be drawn; it is left out of steps before
    redraws        the row of a token may be computed again, as its mask came late

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

    def __post_init__(self) -> None:
        if not self.tokens:
            raise UsageError("the prompt", expected="at least one token", found="none")
        if self.max_tokens < 1:
            raise UsageError("max_tokens", expected="at least 1", found=self.max_tokens)
        if self.priority not in PRIORITIES:
            raise UsageError("priority", expected="-1, 0 or 1", found=self.priority)


class State(enum.Enum):
    """WAITING has no pages. PREFILLING has tokens to compute before its next one is drawn, RUNNING only its last."""

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
    """A request under way.

    tokens      prompt and answer, without those that are dropped; the last one drawn is not computed yet
    dropped     tokens that the context has lost
    few_from    tokens before it are computed as prompt rows ("many"), those from it on with decode's arithmetic
                ("few"): the length of the prompt, or of what was computed anew when RoPE's frequencies changed or the
                context was shifted
    computed    the keys and values of so many tokens are in pages
    tables      by group of pages, the page of each 16 tokens; -1 where a window has left them behind
    kept_from   by group, the first page that has not been left behind
    slot        where the states after the computed tokens are, -1: before the first token, or a model without slots
    next_slot   where the step under way writes them, -1: there is none
    checkpoint  the last one that this sequence left in the prefix tree
    node        the deepest node of the prefix tree that this sequence uses, and `shared`, how deep it is
    cached      tokens of the prompt that were found when the request was first admitted
    draft       proposed tokens after the last one
    passed_s    how long shorter prompts went before this one, less how long it was served since
    behind      the sequence that computes the beginning of this one, up to `behind_tokens`
    """

    id: int
    request: Request
    tables: list[array[int]]
    kept_from: list[int]
    tokens: list[int] = field(init=False)
    few_from: int = field(init=False)
    state: State = State.WAITING
    computed: int = 0
    slot: int = -1
    next_slot: int = -1
    checkpoint: Checkpoint | None = None
    node: Node | None = None
    shared: int = 0
    cached: int | None = None
    draft: list[int] = field(default_factory=list)
    dropped: int = 0
    preemptions: int = 0
    passed_s: float = 0.0
    behind: Sequence | None = None
    behind_tokens: int = 0
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        self.few_from = len(self.tokens)

    @property
    def left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> int:
        """How many tokens of the answer are drawn."""
        return self.dropped + len(self.tokens) - len(self.request.tokens)

    @property
    def order(self) -> tuple[int, float, int]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return (-self.request.priority, self.request.arrival, self.id)

    def few_mask(self, page: int) -> int:
        """Bit i: token i of this page is computed as a few row."""
        return _ALL_FEW << max(0, self.few_from - page * PAGE) & _ALL_FEW

    def rope_length(self, position: int) -> int:
        """The length that RoPE's frequencies at this position follow: of the whole prompt, or up to the token."""
        return max(self.few_from, position + 1)

    def push(self, token: int, context: int) -> None:
        """Append a drawn token; sets `finish` where it ends the answer."""
        self.tokens.append(token)
        request = self.request
        if token in request.stop_ids:
            self.finish = Finish.STOP
        elif self.answer >= request.max_tokens or (len(self.tokens) >= context and not request.shifts):
            self.finish = Finish.LENGTH

    def shift(self, context: int) -> bool:
        """Drop tokens where the context is full; whether it was. Its caller has what is left computed anew."""
        dropped = tokens_to_drop(len(self.tokens), context)
        if dropped:
            self.tokens = without_dropped(self.tokens, dropped)
            self.dropped += dropped
            if self.request.drafter is not None:
                self.request.drafter.restart()
        return bool(dropped)
