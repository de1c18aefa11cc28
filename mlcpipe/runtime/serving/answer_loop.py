"""Many answers, a step at a time, for the server's thread or for whoever reads a token: plan, compute, deliver."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import ComputeError, MlcpipeError, UsageError, last_line, no_memory
from mlcpipe.runtime.remote.lane import StageLostError
from mlcpipe.runtime.sampler import Row, log_probabilities
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.canvas import Denoising
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.core import GREEDY, Core, Drawn
from mlcpipe.runtime.serving.denoised import denoising_of
from mlcpipe.runtime.serving.draft_model import DraftSource, ModelDrafter
from mlcpipe.runtime.serving.drafting import Drafter, Lookup
from mlcpipe.runtime.serving.interface import (
    EngineStats,
    FinishReason,
    PictureStats,
    PromptLogprob,
    Request,
    Stream,
    TokenEvent,
    Wake,
    check_pictures,
)
from mlcpipe.runtime.serving.message_borders import page_borders
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, Sequence, State
from mlcpipe.runtime.serving.step import Event, PrefillRows, Step
from mlcpipe.runtime.serving.whole_answer import WholeAnswer
from mlcpipe.runtime.token_rules import RowRules

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.CANCELLED: "cancelled",
    Finish.TIMEOUT: "timeout",
    Finish.ERROR: "error",
}


@dataclass(eq=False)
class Answer:
    """A request in progress: its stream, and how its tokens are sampled."""

    stream: Stream
    row: Row
    came_s: float
    sequence: Sequence | None = None
    dropped: int = 0  # tokens of the prompt
    queued_s: float = 0.0
    cached_tokens: int = 0
    logprobs: deque[tuple[float | None, tuple[tuple[int, float], ...]]] = field(default_factory=deque)  # of new tokens
    scores: list[PromptLogprob] = field(default_factory=list)  # of the prompt's tokens but the first
    lookup: Lookup | None = None
    drafter: Drafter | None = None
    denoising: Denoising | WholeAnswer | None = None


class AnswerLoop:
    """All answers in progress over one `Core`. `answer` may be called from any thread, the rest from one at a time.

    `drafts`: whether tokens that are looked up in an answer's texts are checked several at a time, where that is
    faster; `draft_model` proposes them where the texts do not. With `context_shift` prompts and answers may be longer
    than the context, which then holds their first page and their last tokens. With `parks` an answer that has ended
    keeps its pages until others need them, so that the next turn continues after its last token; a handler of signals
    that raises may then stop a prefill, see `step`.
    """

    def __init__(
        self,
        core: Core,
        *,
        drafts: bool = False,
        draft_model: DraftSource | None = None,
        context_shift: bool = False,
        parks: bool = False,
    ) -> None:
        self._core, self.context_shift, self._parks = core, context_shift, parks
        self._drafts, self._draft_model = drafts, draft_model
        self._numbers = itertools.count(1)
        self.answers: dict[int, Answer] = {}  # by stream, all that have not ended
        self._of_sequence: dict[int, Answer] = {}
        self._news: dict[Wake, dict[Stream, None]] = {}  # streams with events, by whom to wake
        self._computing = False
        self._finished: Counter[str] = Counter()
        self._pictures = 0
        self._scoring: dict[int, Answer] = {}  # by the id of its prompt's list, whose log-probabilities it computes
        self._step_s: dict[str, float] = {"prefill": 0.0, "decode": 0.0}

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return self._core.limits.context

    @property
    def has_work(self) -> bool:
        """Whether any answer has not ended."""
        return self._core.scheduler.has_work

    def answer(self, request: Request, wake: Wake | None) -> Answer:
        """A checked request as it will be computed after `begin`. Raises UsageError for what the model cannot do."""
        denoising = denoising_of(request, self._core.bundle.manifest.model.diffusion, self._core.limits)
        stream = Stream(next(self._numbers), request, wake)
        matcher = None if request.grammar is None else request.grammar.matcher()
        rules = None
        if request.rules is not None and not request.rules.neutral:
            rules = partial(RowRules, request.rules, request.sampling, request.ids, request.stop_ids)
        answer = Answer(
            stream, Row(request.sampling, request.ids, matcher, rules), time.monotonic(), denoising=denoising
        )
        if self._drafts and rules is None and denoising is None:  # which take one token after the other
            row, drafts = answer.row, None if request.pictures else self._draft_model  # which sees none
            answer.lookup = lookup = Lookup(request.prediction or (), row.allowed, request.stop_ids)
            answer.drafter = lookup if drafts is None else ModelDrafter(drafts, lookup, row)
        return answer

    def begin(self, answer: Answer) -> None:
        """Queue a request."""
        request = answer.stream.request
        self.answers[answer.stream.id] = answer
        adapter, how = request.adapter, answer.denoising
        leader, ready = self._scoring.get(id(request.tokens)), answer.row.ready
        if request.prompt_logprobs is not None:
            self._scoring[id(request.tokens)] = leader = answer
        elif leader is not None:
            ready = partial(_ready_after, leader, answer.row)
        answer.dropped = tokens_to_drop(len(request.tokens), self.context_length)
        try:
            if adapter is not None and adapter.unloaded:
                raise UsageError(f"the adapter {adapter.name} was unloaded")
            check_pictures(request)
            answer.sequence = self._core.scheduler.submit(
                ScheduledRequest(
                    tuple(without_dropped(request.tokens, answer.dropped)),
                    request.max_tokens if how is None else how.most(request.max_tokens),
                    stop_ids=request.stop_ids,
                    priority=max(-1, min(1, -request.priority)),
                    deadline_s=request.deadline_s,
                    namespace=request.namespace if leader is None else ("scored", leader.stream.id),
                    deterministic=request.deterministic,
                    params=answer.row,
                    drafter=answer.drafter,
                    adapter=adapter,
                    arrival=answer.came_s,
                    shifts=self.context_shift,
                    ready=ready,
                    redraws=answer.row.matcher is not None or self._parks,
                    parks=self._parks,
                    scored=request.prompt_logprobs is not None,
                    pictures={one.number: one for one in request.pictures},
                    denoising=how,
                    borders=() if answer.dropped else page_borders(len(request.tokens), request.control),
                )
            )
        except MlcpipeError as error:
            self._end(answer, "error", error)
            return
        self._pictures += len(request.pictures)
        if adapter is not None:
            adapter.users += 1
        self._of_sequence[answer.sequence.id] = answer

    def cancel(self, number: int, finish: Finish = Finish.CANCELLED) -> None:
        """End the answer of the stream with this id, if it has not ended."""
        if (answer := self.answers.get(number)) is not None and answer.sequence is not None:
            event = self._core.scheduler.cancel(answer.sequence, finish)
            self._deliver([event] if event is not None else [])

    def release(self, adapter: Adapter) -> None:
        """Free the room of an unloaded adapter, unless a request uses it."""
        if not adapter.users and adapter.unloaded and self._core.executor.adapters is not None:
            self._core.executor.adapters.release(adapter)

    def step(self) -> bool:
        """Compute the next step and put its events in their streams; False if no answer can continue.

        Errors of a step end its answers. Where answers park, an exception of a signal's handler is raised here: in the
        middle of a computation it changes nothing, elsewhere all answers end and everything computed is forgotten.
        """
        try:
            return self._step()
        except BaseException as error:
            if self._parks and not self._computing:
                self._core.reset()
                self.end_all(ComputeError("the engine was interrupted", found=last_line(error)))
            raise
        finally:
            self._computing = False

    def _step(self) -> bool:
        if not self._core.ready():
            return False
        scheduler = self._core.scheduler
        if self._draft_model is not None:
            self._draft_model.propose(scheduler)
        now = time.monotonic()
        self._deliver(scheduler.expire(now))
        step = scheduler.plan(now)
        if step is None:
            return False
        try:
            self._compute(step)
        except StageLostError as error:
            self._lose(error)
        except MlcpipeError as error:
            self._fail(step, error)
        except Exception as error:
            if (ours := no_memory(error)) is None and self._parks:
                self._unplan(step)
                raise
            self._fail(step, ours or ComputeError("the engine failed", found=last_line(error)))
        except BaseException:
            self._unplan(step)
            raise
        return True

    def _compute(self, step: Step) -> None:
        """Compute a step, and deliver its tokens."""
        for rows in step.prefill:
            for one in (rows.sequence, *rows.drawing):
                answer = self._of_sequence.get(one.id)
                if answer is not None and not answer.queued_s:
                    answer.queued_s = step.planned - answer.came_s
            self._tell_progress(rows)
        self._core.copy_pages(step)
        self._computing = True
        for sequence, error in self._core.encode_pictures(step):
            self._fail_alone(sequence, error)
        if self._parks and step.prefill:
            with interruptible(self._core.bundle.library.module, sum(rows.rows for rows in step.prefill)):
                computed = self._core.forward(step, self.wake)
        else:
            computed = self._core.forward(step, self.wake)
        self._computing = False
        began = time.monotonic()
        for part in computed:
            for rows, logits in part.scores():
                self._score(rows, logits)
        step.planned += time.monotonic() - began  # which is none of the step's
        tokens = [token for one in computed for token in one.take(self._take)]
        confidence = [one for part in computed for one in part.confidence]
        now = time.monotonic()
        self._step_s["prefill" if step.prefill else "decode"] += now - step.planned
        self._deliver(self._core.scheduler.settle(step, tokens, now, confidence))

    def _score(self, rows: PrefillRows, logits: NDArray[np.float32]) -> None:
        """Log-probabilities of the tokens that follow these rows of a prompt, with their logits f32[rows, V]."""
        answer = self._of_sequence.get(rows.sequence.id)
        if answer is None or rows.sequence.answer:
            return
        request = answer.stream.request
        following = request.tokens[rows.begin + 1 : rows.begin + rows.rows + 1]
        del answer.scores[rows.begin :]  # of rows before a preemption
        for row, token in zip(logits, following):
            logprob, top = log_probabilities(row, token, GREEDY.params, request.prompt_logprobs or 0)
            answer.scores.append(PromptLogprob(logprob, int((row > row[token]).sum()) + 1, tuple(top)))

    def _tell_progress(self, rows: PrefillRows) -> None:
        """How far a prompt is computed, before these rows of it, for a request that asks."""
        sequence = rows.sequence
        answer = self._of_sequence.get(sequence.id)
        if answer is None or not answer.stream.request.progress or sequence.answer:
            return
        stream = answer.stream
        stream.put(TokenEvent(None, cached_tokens=sequence.cached or 0, computed=rows.begin))
        if stream.wake is not None:
            self._news.setdefault(stream.wake, {})[stream] = None

    def _fail_alone(self, sequence: Sequence, error: Exception) -> None:
        """End one answer whose pictures could not be computed; what was computed of its prompt is right."""
        ours = error if isinstance(error, MlcpipeError) else no_memory(error)
        if ours is None and self._parks:
            raise error
        self._core.scheduler.cancel(sequence)
        if (answer := self._of_sequence.get(sequence.id)) is not None:
            self._end(answer, "error", ours or ComputeError("the tower failed", found=last_line(error)))

    def _unplan(self, step: Step) -> None:
        """Forget a step that was not computed; pages and slots that it reserved are those of the next one."""
        for rows in step.decode:
            rows.sequence.draft = []

    def _take(self, drawn: Drawn) -> None:
        """Add a token to its answer, which ends here if that fails."""
        sequence, token, settings, logits = drawn
        answer = self._of_sequence.get(sequence.id)
        if answer is None:
            return
        try:
            if token < 0:
                raise self._core.not_finite(sequence)
            if settings.mask_error is not None:
                raise settings.mask_error
            answer.row.accept(token)
            request = answer.stream.request
            if request.logprobs is not None:
                logprob, top = log_probabilities(logits(), token, request.sampling, request.logprobs)
                answer.logprobs.append((logprob, tuple(top)))
        except MlcpipeError as error:
            wrong = isinstance(error, ComputeError)  # after a grammar's error keys and values are right
            self._core.scheduler.cancel(sequence, Finish.ERROR if wrong else Finish.CANCELLED)
            self._end(answer, "error", error)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Pass events to the streams of their answers."""
        for sequence, tokens, finish in events:
            answer = self._of_sequence.get(sequence.id)
            if answer is None:
                continue
            reason = None if finish is None else _REASONS[finish]
            if reason is None and answer.row.matcher is not None and answer.row.matcher.ended:
                self._core.scheduler.cancel(sequence, Finish.STOP)
                reason = "stop"
            answer.cached_tokens = sequence.cached or 0
            for token in tokens[: len(tokens) - (reason is not None)]:
                self._tell(answer, token)
            if reason is not None:
                self._end(answer, reason, token=tokens[-1] if tokens else None)

    def _end(
        self, answer: Answer, reason: FinishReason, error: MlcpipeError | None = None, token: int | None = None
    ) -> None:
        self.answers.pop(answer.stream.id, None)
        if self._scoring.get(id(answer.stream.request.tokens)) is answer:
            del self._scoring[id(answer.stream.request.tokens)]
        if answer.sequence is not None and self._of_sequence.pop(answer.sequence.id, None) is not None:
            adapter = answer.stream.request.adapter
            if adapter is not None:
                adapter.users -= 1
                self.release(adapter)
        self._finished[reason] += 1
        self._tell(answer, token, reason, error)

    def end_all(self, error: MlcpipeError) -> None:
        """End all answers with an error, as nothing can be computed for them."""
        for answer in list(self.answers.values()):
            self._end(answer, "error", error)

    def _tell(
        self,
        answer: Answer,
        token: int | None,
        reason: FinishReason | None = None,
        error: MlcpipeError | None = None,
    ) -> None:
        """Put a token, or the end, in the stream; `wake` announces it."""
        logprob, top = answer.logprobs.popleft() if token is not None and answer.logprobs else (None, ())
        stream, predicted, dropped = answer.stream, (0, 0), answer.dropped
        if reason is not None and answer.lookup is not None:
            predicted = answer.lookup.predicted
        if answer.sequence is not None:
            dropped += answer.sequence.dropped
        stream.put(
            TokenEvent(
                token,
                reason,
                logprob,
                top,
                answer.cached_tokens,
                answer.queued_s,
                error,
                predicted,
                dropped,
                None if answer.sequence is None else answer.sequence.miss,
                tuple(answer.scores),
            )  # fmt: skip
        )
        answer.scores = []
        if stream.wake is not None:
            self._news.setdefault(stream.wake, {})[stream] = None

    def wake(self) -> None:
        """Wake the consumers of new events; before this thread waits, so that they read while it needs no processor."""
        news, self._news = self._news, {}
        for wake, streams in news.items():
            wake(list(streams))

    def _fail(self, step: Step, error: MlcpipeError) -> None:
        """End all requests of a step that could not be computed."""
        for sequence in (*(one.sequence for one in step.decode), *(one.sequence for one in step.prefill)):
            answer = self._of_sequence.get(sequence.id)
            self._core.scheduler.cancel(sequence, Finish.ERROR)
            if answer is not None:
                self._end(answer, "error", error)

    def _lose(self, error: StageLostError) -> None:
        """End all answers that have begun, as states of theirs are lost; those that wait stay in the queue."""
        self._core.reset()
        waiting = []
        for answer in list(self.answers.values()):
            sequence = answer.sequence
            if sequence is not None and sequence.state is State.WAITING and not (sequence.computed or sequence.answer):
                del self._of_sequence[sequence.id]  # numbers begin again
                waiting.append(answer)
            else:
                self._end(answer, "error", error)
        for answer in waiting:
            self.begin(answer)

    def stats(self) -> EngineStats:
        """Counts and gauges of this moment."""
        scheduler, swap = self._core.scheduler, self._core.scheduler.admission.swap
        counts = scheduler.pool.counts()
        counts = counts[: len(scheduler.pool.groups)]
        pages = sum(sum(each) for each in counts)
        return EngineStats(
            running=len(scheduler.admission.running) + len(scheduler.admission.prefilling),
            waiting=len(scheduler.admission.waiting),
            kv_usage=sum(each.used for each in counts) / pages,
            prompt=scheduler.totals.prefix_queries,
            cached=scheduler.totals.prefix_hits,
            lost=scheduler.totals.prefix_lost,
            misses=dict(scheduler.totals.misses),
            generated=scheduler.totals.answer_tokens,
            preemptions=scheduler.totals.preemptions,
            swapped_out=0 if swap is None else swap.tokens_out,
            swapped_in=0 if swap is None else swap.tokens_in,
            swap_bytes=0 if swap is None else swap.bytes,
            drafts=scheduler.totals.drafts,
            drafted=scheduler.totals.drafted,
            accepted=scheduler.totals.accepted,
            finished=dict(self._finished),
            step_s=dict(self._step_s),
            pictures=self._picture_stats(),
        )

    def _picture_stats(self) -> PictureStats | None:
        rows = self._core.executor.pictures
        if rows is None:
            return None
        return PictureStats(self._pictures, rows.encoded, rows.rows, rows.seconds, rows.queries, rows.hits)


def _ready_after(leader: Answer, row: Row) -> bool:
    """Whether an answer may begin whose prompt another one computes, all of it for its log-probabilities."""
    first = leader.sequence
    return (first is None or first.finish is not None or first.answer > 0) and row.ready()
