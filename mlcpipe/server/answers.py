"""The answers to one HTTP request: turns the engine's tokens into text, reasoning, calls and log-probabilities."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlcpipe.runtime.answer_reader import AnswerReader, Reading
from mlcpipe.runtime.sampler import named_logprob
from mlcpipe.runtime.sampling_params import CacheMiss, CallPiece, TokenLogprob, ToolCall, add_pieces
from mlcpipe.runtime.serving.interface import PromptLogprob, Request, ServingEngine, Stream, TokenEvent
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.metrics import RequestTimer

LOWEST_LOGPROB = -9999.0  # as OpenAI: for tokens that a grammar forbids; JSON has no infinity
MAX_PENDING = 4096  # tokens by which a reader may lag behind
MAX_SCORES = 1 << 18  # log-probabilities of prompts in a response
_SCORE_BYTES = 64  # of one of them, as JSON
Scores = list[tuple[TokenLogprob, int]]
Aside = Callable[[Callable[[], Any], int], Awaitable[Any]]


@dataclass(slots=True)
class Delta:
    """A part of one answer; the last one has `finish`: stop, length or tool_calls.

    progress: of its prompt, tokens that were found computed, and those that are computed so far.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stop_string: str | None = None
    progress: tuple[int, int] | None = None

    @property
    def empty(self) -> bool:
        """Whether it has no content."""
        return not (self.text or self.reasoning or self.calls or self.logprobs or self.finish or self.progress)


@dataclass
class Usage:
    """Token counts: `cached` of the prompt from the prefix cache, `reasoning` within the answer.

    `miss`: why no more was cached, of the first prompt for which there is a reason.

    `prompt_s`: of computing the prompts, until the first token, `answer_s`: from there to the last token; both of the
    answer that took longest. `begun`: answers with a token; each one's first is computed with its prompt.

    `predicted`: of a client's prediction, the accepted and the rejected tokens. `dropped`: tokens of prompt and answers
    lost to context shifts; None if contexts are not shifted.
    """

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    predicted: tuple[int, int] | None = None
    prompt_s: float = 0.0
    answer_s: float = 0.0
    begun: int = 0
    dropped: int | None = None
    miss: CacheMiss | None = None

    @property
    def own_json(self) -> dict[str, Any]:
        """Fields that no other server has: `cache_miss`, and `dropped_tokens` of servers that shift contexts."""
        dropped = {} if self.dropped is None else {"dropped_tokens": self.dropped}
        return dropped if self.miss is None else {"cache_miss": self.miss.described(), **dropped}


class Waker:
    """Wakes the loop's thread from the engine's: one call for all events since the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._streams: list[Stream] = []

    def wake(self, streams: Sequence[Stream]) -> None:
        """Have the loop call the listeners of these streams, each once. From any thread."""
        with self._lock:
            scheduled = bool(self._streams)
            self._streams += streams
        if not scheduled:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, []
        for listener in {stream.listener for stream in streams}:
            if listener is not None:
                listener()


class DeltaSource(ABC):
    """All answers to one request, as they come or whole. `close` may be called twice."""

    def __init__(self, usage: Usage, count: int = 1) -> None:
        self.usage, self.count = usage, count
        # By answer, the tokens of its prompt but the first with their ranks; before its first delta.
        self.prompt_logprobs: dict[int, Scores] = {}
        self.prompt_sizes: dict[int, int] = {}  # tokens of prompts whose progress is told, by the first answer

    @property
    def scores_bytes(self) -> int:
        """About how long the JSON of `prompt_logprobs` is."""
        return sum(_bytes_of(scores) for scores in self.prompt_logprobs.values())

    @abstractmethod
    def close(self) -> None:
        """Cancel unfinished answers."""

    @abstractmethod
    def deltas(self) -> AsyncIterator[Delta]:
        """The deltas until all answers are finished. Raises ApiError if one fails."""

    async def whole(self) -> list[Answer]:
        """The answers, once all are finished. Raises ApiError if one fails."""
        answers = [Answer() for _ in range(self.count)]
        async for delta in self.deltas():
            answers[delta.index].add(delta)
        return answers


class Answers(DeltaSource):
    """Answers of an engine. `aside` does work on a number of bytes, see `OffLoop`.

    Of several answers to one prompt the first alone may ask for its log-probabilities, which are those of all.
    """

    def __init__(self, engine: ServingEngine, waker: Waker, tokenizer: Tokenizer, aside: Aside) -> None:
        super().__init__(Usage(dropped=0 if engine.context_shift else None), 0)
        self._engine = engine
        self._waker = waker
        self._tokenizer, self._aside = tokenizer, aside
        self._changed = asyncio.Event()
        self._choices: list[_Choice] = []
        self._slow = False

    def submit(self, request: Request, reading: Reading, timer: RequestTimer) -> None:
        """Ask for one more answer. Raises what the engine's `submit` raises."""
        stream = self._engine.submit(request, self._waker.wake)
        stream.listener = self._wake  # not read yet by the loop, which runs this
        first = not self._choices or self._choices[-1].stream.request.tokens is not request.tokens
        leader = None if first else self._choices[-1].leader
        self._choices.append(_Choice(len(self._choices), stream, reading, self._tokenizer, timer, self, leader))
        self.count += 1
        if first:
            self.usage.prompt += len(request.tokens)
            self.prompt_sizes |= {self.count - 1: len(request.tokens)} if request.progress else {}

    def first_token(self, index: int) -> TokenLogprob:
        """The first token of an answer's prompt, of which there is no probability."""
        return named_logprob(self._tokenizer, self._choices[index].stream.request.tokens[0], 0.0)

    def close(self) -> None:
        """Cancel unfinished answers."""
        for choice in self._choices:
            if not choice.ended:
                self._engine.cancel(choice.stream.id)

    async def deltas(self) -> AsyncIterator[Delta]:
        """As `DeltaSource.deltas`."""
        while not all(choice.finished for choice in self._choices):
            await self._changed.wait()
            self._changed.clear()
            for choice in self._choices:
                if choice.held:
                    continue
                deltas = choice.take()
                if (scores := choice.scores) is not None:
                    tokens, choice.scores = choice.stream.request.tokens[1:], None
                    work = partial(_named, self._tokenizer, tokens, scores)
                    self.prompt_logprobs[choice.index] = await self._aside(work, _bytes_of(scores))
                elif choice.leader.index in self.prompt_logprobs:
                    self.prompt_logprobs[choice.index] = self.prompt_logprobs[choice.leader.index]
                for delta in deltas:
                    if not delta.empty:
                        yield delta
                if choice.finished and not choice.ended:  # by a stop string
                    self._engine.cancel(choice.stream.id, "stop")
            if self._slow:
                raise ApiError(499, "the client reads too slowly")

    def _wake(self) -> None:
        if any(choice.stream.pending > MAX_PENDING and not choice.held for choice in self._choices):
            self._slow = True
            self.close()
        self._changed.set()


@dataclass
class Answer:
    """A whole answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = "stop"
    stop_string: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += delta.logprobs
        add_pieces(self.calls, delta.calls)
        self.finish = delta.finish or self.finish
        self.stop_string = delta.stop_string or self.stop_string


class _Choice:
    """One streaming answer. `finished`: its last delta was sent; `ended`: the engine is done with it.

    `leader`: the first answer to its prompt. `scores`: of the prompt, as they came.
    """

    def __init__(
        self,
        index: int,
        stream: Stream,
        reading: Reading,
        tokenizer: Tokenizer,
        timer: RequestTimer,
        answers: DeltaSource,
        leader: _Choice | None,
    ) -> None:
        self.stream = stream
        self.finished = self.ended = False
        self.index, self._tokenizer, self._timer, self._usage = index, tokenizer, timer, answers.usage
        self.leader: _Choice = leader or self
        self.scores: tuple[PromptLogprob, ...] | None = None
        self._scored = self.leader.stream.request.prompt_logprobs is not None
        self._prompt_logprobs, self._reading = answers.prompt_logprobs, reading
        self._counts_cached = leader is None  # of the answers to one prompt, the first reports cached tokens
        self._reader = AnswerReader(tokenizer, reading, stream.request.stop_ids)
        self._tokens = self._dropped = 0

    @property
    def held(self) -> bool:
        """Whether it waits for the log-probabilities of its prompt."""
        return self._scored and self.leader is not self and self.leader.index not in self._prompt_logprobs

    def take(self) -> list[Delta]:
        """The engine's outputs since the last call."""
        return [delta for event in self.stream.take() if (delta := self._delta(event)) is not None]

    def _delta(self, event: TokenEvent) -> Delta | None:
        self.ended = event.finish_reason is not None
        if self.ended and self.stream.request.prediction is not None:
            right, wrong = self._usage.predicted or (0, 0)
            self._usage.predicted = right + event.prediction[0], wrong + event.prediction[1]
        if self.finished:
            return None
        if event.token is None and not self.ended:
            return Delta(self.index, progress=(event.cached_tokens, event.computed))
        if self._usage.dropped is not None:
            self._usage.dropped += event.dropped - self._dropped
            self._dropped = event.dropped
        if event.error is not None:
            self.finished = True
            raise refused(event.error)
        if event.finish_reason == "cancelled":
            self.finished = True
            raise ApiError(503, "the server ended the request", code="cancelled", retry_after_s=5.0)
        if self._scored and self.leader is self and not self._tokens:
            self.scores = event.prompt_logprobs
        if self._reading.silent:
            event = event._replace(token=None, finish_reason=event.finish_reason and "length")
        logprobs = []
        if event.token is not None:
            self._tokens += 1
            self._timer.token(event.queued_s)
            self._usage.prompt_s = max(self._usage.prompt_s, self._timer.prompt_s)
            self._usage.answer_s = max(self._usage.answer_s, self._timer.answer_s)
            self._usage.completion += 1
            self._usage.begun += self._tokens == 1
            if self._tokens == 1 and self._counts_cached:
                self._usage.cached += event.cached_tokens
                self._usage.miss = self._usage.miss or event.cache_miss
            self._usage.reasoning += self._reader.inside
            request = self.stream.request
            if event.logprob is not None and (self._scored or event.token not in request.stop_ids):
                top = [(token, max(logprob, LOWEST_LOGPROB)) for token, logprob in event.top]
                logprob = max(event.logprob, LOWEST_LOGPROB)
                logprobs.append(named_logprob(self._tokenizer, event.token, logprob, top))
        part = self._reader.read(event.token, last=self.ended)
        if not self._reading.thoughts:
            part = part._replace(reasoning="")
        self.finished = self.ended or self._reader.stopped is not None
        if not self.finished:
            return Delta(self.index, part.text, part.reasoning, part.calls, tuple(logprobs))
        self._timer.end(self._tokens)
        finish = self._reader.finish_reason(cut_off=event.finish_reason in ("length", "timeout"))
        stop_string = self._reader.stop_string
        return Delta(self.index, part.text, part.reasoning, part.calls, tuple(logprobs), finish, stop_string)


def _named(tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[PromptLogprob]) -> Scores:
    return [
        (named_logprob(tokenizer, token, max(one.logprob, LOWEST_LOGPROB), one.top), one.rank)
        for token, one in zip(tokens, scores)
    ]


def check_scores(tokens: int, alternatives: int | None, n: int, name: str) -> None:
    """Raises ApiError for too many log-probabilities of prompts with so many `tokens`, each in `n` answers."""
    count = 0 if alternatives is None else tokens * (1 + alternatives) * n
    if count > MAX_SCORES:
        message = (
            f"{name}: expected at most {MAX_SCORES} log-probabilities of prompts, which are their tokens times "
            f"1 + alternatives times n; found {count}; send fewer tokens, or ask for fewer alternatives or answers"
        )
        raise ApiError(400, message, param=name)


def _bytes_of(scores: Sequence[PromptLogprob] | Scores) -> int:
    """About how long the JSON of a prompt's log-probabilities is."""
    if not scores:
        return 0
    first = scores[0]
    top = first.top if isinstance(first, PromptLogprob) else first[0].top
    return _SCORE_BYTES * len(scores) * (1 + len(top))
