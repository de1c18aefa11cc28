"""The interface of a serving engine: requests go in from any thread, events of their tokens come out."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import MlcpipeError, ResourceError, UsageError
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.sampling_params import CacheMiss, SamplingParams
from mlcpipe.runtime.serving.adapters import Adapter, PackedAdapter
from mlcpipe.runtime.serving.grammar import Grammar
from mlcpipe.runtime.token_rules import TokenRules
from mlcpipe.vision.processors.picture import Picture, ids_of

FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]
Wake = Callable[["Sequence[Stream]"], None]


class OverloadedError(ResourceError):
    """The queue of requests is full, or the engine is closing; `retry_after_s`: seconds until a retry makes sense."""

    def __init__(self, what: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(what, next_step=f"try again in {retry_after_s:.0f} s")


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and how to answer it.

    tokens      the prompt, one id or more; negative ones stand for rows of `pictures`
    max_tokens  most tokens of the answer; the context may end it earlier
    sampling    how tokens are sampled; its `logprobs` is not read
    stop_ids    tokens that end the answer with "stop"; they are in the events
    logprobs    None, or how many alternatives each token reports (0: its own log-probability alone)
    grammar     the grammar that the answer must match, or None
    priority    lower goes first, as in vLLM
    deadline_s  when the answer ends with "timeout", on the clock of `time.monotonic`
    namespace   requests share computed prompts within one namespace only
    deterministic  reuse only keys and values that were computed as those of a prompt; answers' differ a little
    prediction  tokens that the answer may contain; they make it faster if it does, and never change it
    adapter     from the engine's `load_adapter`, or None for the model without one
    rules       about tokens, beyond `sampling`, or None
    prompt_logprobs  None, or how many alternatives each token of the prompt reports; such a prompt is computed whole,
                once for all requests that are submitted after it, as long as it runs, with the same list of tokens
    pictures    those in the prompt
    control     where the prompt has control tokens, in order: messages begin and end there
    progress    whether events tell how far the prompt is computed, before each part of it
    """

    tokens: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    grammar: Grammar | None = None
    priority: int = 0
    deadline_s: float | None = None
    namespace: str = ""
    deterministic: bool = False
    prediction: Sequence[int] | None = None
    adapter: Adapter | None = None
    rules: TokenRules | None = None
    prompt_logprobs: int | None = None
    pictures: Sequence[Picture] = ()
    control: Sequence[int] = ()
    progress: bool = False

    @property
    def ids(self) -> list[int]:
        """The prompt's tokens of the vocabulary: those of pictures are the token that stands for one."""
        return ids_of(self.tokens, self.pictures)


class PromptLogprob(NamedTuple):
    """A token of a prompt: the natural logarithm of its probability, its rank from 1, alternatives, best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class TokenEvent(NamedTuple):
    """One token of an answer, the progress of its prompt, or its end.

    The last event of a stream, and no other, has `finish_reason`.

    token          None for progress, and where the answer ends without one (timeout, cancelled, error)
    logprob        natural logarithm of its probability after temperature, penalties and grammar
    top            alternatives (token, logprob), best first
    cached_tokens  tokens of the prompt whose keys and values were cached, and `cache_miss`, why no more
    queued_s       seconds that the request waited in the queue
    prediction     of the last event: accepted and rejected tokens of the client's prediction
    dropped        tokens of the prompt and the answer that a shifted context has lost so far
    prompt_logprobs  of the first token, where the request asks: those of the prompt's tokens but the first
    computed       of an event without token and end: tokens of the prompt that are computed so far
    """

    token: int | None
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    cached_tokens: int = 0
    queued_s: float = 0.0
    error: MlcpipeError | None = None
    prediction: tuple[int, int] = (0, 0)
    dropped: int = 0
    cache_miss: CacheMiss | None = None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    computed: int = 0


class Stream:
    """The events of one request: an engine puts them, one consumer takes them. `listener` is the consumer's own."""

    def __init__(self, number: int, request: Request, wake: Wake | None = None) -> None:
        self.id = number
        self.request = request
        self.wake = wake
        self.listener: Callable[[], None] | None = None
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()

    @property
    def pending(self) -> int:
        """Number of events not taken yet."""
        return self._events.qsize()

    def put(self, event: TokenEvent) -> None:
        """Add an event; for engines, which call `wake` afterwards."""
        self._events.put(event)

    def take(self) -> list[TokenEvent]:
        """The events since the last call, without waiting."""
        events = []
        while True:
            try:
                events.append(self._events.get_nowait())
            except queue.Empty:
                return events

    def __iter__(self) -> Iterator[TokenEvent]:
        """All events, waiting for each."""
        while True:
            event = self._events.get()
            yield event
            if event.finish_reason is not None:
                return


@dataclass(frozen=True)
class PictureStats:
    """Pictures since an engine's start.

    given    pictures of requests
    tiles    computed by the tower, each one call of it, with `rows` rows in `seconds`
    queries  tiles that prompts needed, without those of prefixes that were found, of which `hits` were kept
    """

    given: int = 0
    tiles: int = 0
    rows: int = 0
    seconds: float = 0.0
    queries: int = 0
    hits: int = 0


@dataclass(frozen=True)
class EngineStats:
    """Counters of an engine since its start, and gauges of now. Counts are of tokens unless they say otherwise.

    kv_usage         part of the KV cache that is in use, 0 to 1
    prompt           tokens of admitted prompts, of which `cached` were found computed, and `lost` would have been if
                     the recurrent state, or the window, after them had been kept
    misses           requests of which not all was found that could be, by `CacheMiss.reason`
    preemptions      of requests
    swapped_out      tokens whose keys and values were copied to the host, and `swapped_in`, back
    swap_bytes       on the host now
    drafts           number of checked drafts, with `drafted` tokens, of which `accepted` were accepted
    finished         requests by how they ended
    step_s           seconds of computing by part of a step
    pictures         None for a model that sees none
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt: int = 0
    cached: int = 0
    lost: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    generated: int = 0
    preemptions: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    swap_bytes: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    pictures: PictureStats | None = None


def check_pictures(request: Request) -> None:
    """Raises UsageError for pictures with an adapter."""
    if request.pictures and request.adapter is not None:
        raise UsageError("an adapter sees no pictures", found=request.adapter.name, next_step="send text only")


def check_request(request: Request, context_length: int, vocab_size: int, *, shifts: bool = False) -> None:
    """Raises UsageError for a request that cannot be computed; with `shifts` a prompt may exceed the context."""
    ids = request.ids
    wrong = [token for token in ids if not isinstance(token, int) or not 0 <= token < vocab_size]
    if wrong or not ids:
        expected = f"one or more integers from 0 to {vocab_size - 1}"
        raise UsageError("token ids", expected=expected, found=wrong[0] if wrong else "none")
    if len(ids) >= context_length and not shifts:
        raise UsageError(
            "the context is full",
            expected=f"at most {context_length} tokens, prompt and answer",
            found=len(ids) + 1,
            next_step="shorten the prompt, start a new conversation, or load with a larger context",
        )
    if request.max_tokens < 1:
        raise UsageError("max_tokens", expected="an integer from 1", found=request.max_tokens)
    check_pictures(request)
    if request.pictures and request.prompt_logprobs is not None:
        raise UsageError("prompts with pictures have no logprobs", next_step="send text only, or leave them out")
    request.sampling.check_bias(vocab_size)
    if request.prompt_logprobs is not None and len(ids) >= context_length:
        raise UsageError("prompt_logprobs", expected=f"a prompt of less than {context_length} tokens", found=len(ids))


class ServingEngine(Protocol):
    """An engine with its own thread. Every method may be called from any thread and returns at once."""

    @property
    def together(self) -> AbstractContextManager[Any]:
        """Requests that are submitted inside start together: of equal prompts, one is computed."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        ...

    @property
    def context_shift(self) -> bool:
        """Whether longer prompts and answers continue without dropped tokens."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds, of all requests together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        ...

    @property
    def fault(self) -> str:
        """Why the engine stopped; "" while it runs."""
        ...

    def check_queue(self) -> None:
        """Raises OverloadedError when the queue is full."""
        ...

    def submit(self, request: Request, wake: Wake | None = None) -> Stream:
        """Queue a request; the engine's thread calls `wake` after a step, with all streams of it that have new events.

        Raises OverloadedError when the queue is full, and UsageError for a request that cannot be computed.
        """
        ...

    def cancel(self, number: int, reason: Literal["cancelled", "stop"] = "cancelled") -> None:
        """End the stream with this id at the next token, for this reason; nothing happens if it has ended."""
        ...

    def copy_prefix(self, tokens: Sequence[int], namespace: str = "") -> Future[tuple[int, list[NDArray[np.int8]]]]:
        """Number of cached tokens of a prompt, in whole pages, and int8[n, unit_bytes] of each state after them."""
        ...

    def restore_prefix(self, saved: SavedChat, namespace: str = "") -> Future[None]:
        """Have prompts that begin with the tokens of a checked file start with its states.

        The result is a ResourceError if the KV cache has no room.
        """
        ...

    def check_adapters(self) -> None:
        """Raises UsageError if the engine takes no adapters."""
        ...

    def read_adapter(self, folder: Path, name: str) -> PackedAdapter:
        """A checked adapter of PEFT's, after `check_adapters`. Raises CheckpointError."""
        ...

    def load_adapter(self, packed: PackedAdapter) -> Future[Adapter]:
        """Make an adapter available to requests; the result is a ResourceError if there is no room."""
        ...

    def unload_adapter(self, adapter: Adapter) -> None:
        """Refuse new requests with an adapter; its room is free once those in progress have ended."""
        ...

    def stats(self) -> EngineStats:
        """Counts and gauges of this moment."""
        ...

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, give the others `drain_s` seconds, cancel the rest, and wait for the thread."""
        ...
