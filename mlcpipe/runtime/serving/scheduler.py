"""The rows that the next step computes. Uses no device, and a clock only to measure the search for drafts.

Running answers continue: one row each in every step. Prompts fill the time left until `step_s`. A prompt gets its pages
when it is admitted; when answers outgrow the pages, the youngest sequence of the lowest class is preempted.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import abc, deque

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.admission import Admission
from mlcpipe.runtime.serving.block_steps import BlockSteps, is_ready
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Search
from mlcpipe.runtime.serving.interface import OverloadedError
from mlcpipe.runtime.serving.limits import Limits, Totals
from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import Finish, ScheduledRequest, Sequence, State
from mlcpipe.runtime.serving.step import NOT_DRAWN, DecodeRows, Event, PrefillRows, Step, accepted
from mlcpipe.runtime.serving.waiting import level
from mlcpipe.vision.processors.picture import whole_pictures
from tir_schedules.step_layout import PAGE

PATIENCE_S = 2.0  # for which shorter prompts may be served before a long one
_LOOK_AHEAD = 16  # waiting requests beyond the free places, searched for shorter prompts
_MAX_RETRY_S = 60.0


class Scheduler:
    """Call `expire`, `plan`, compute the step, `settle`, in a loop.

    `submit` and `cancel` may come between any two of them, also while the device computes, but before or after the
    tables of a step are read. Results of a step for a cancelled sequence are discarded.

    All times are seconds on the caller's clock, that of `ScheduledRequest.arrival`.
    """

    def __init__(self, pool: PagePool, tree: PrefixTree, cost: CostModel, limits: Limits) -> None:
        self.pool, self.tree, self.cost, self.limits = pool, tree, cost, limits
        self.totals = Totals()
        self.admission = Admission(pool, tree, limits, self.totals)
        self.admission.on_preemption = self._unplan
        self._ids = itertools.count()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._with_deadline = 0  # of them, when ended ones were last removed
        self._ends: deque[float] = deque(maxlen=32)
        self._head: Sequence | None = None  # the long prompt that was first in the last step
        self._step = Step(0.0)  # the one being planned
        self._search, self._searched_s = Search(), 0.0
        self.searches = True  # for drafts, in the next step
        self.held: list[Sequence] = []  # left out of the last plan, because they are not ready
        self._blocks = BlockSteps(tree, limits, self.admission)

    @property
    def has_work(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self.admission.running or self.admission.prefilling or len(self.admission.waiting))

    def submit(self, request: ScheduledRequest) -> Sequence:
        """Queue a request. Raises UsageError if it could never be served, OverloadedError if too many wait."""
        tokens, context, how = len(request.tokens), self.limits.context, request.denoising
        context = context if how is None else how.room(context)
        if tokens >= context:
            raise UsageError("the prompt is too long", expected=f"less than {context} tokens", found=tokens)
        most = min(context, tokens + request.max_tokens)
        most = most if how is None else how.end(most - 1)
        for about in self.pool.groups:
            if about.most(most, self.limits.prefill_chunk) > about.pages:
                raise UsageError("prompt and answer", expected=f"at most {about.pages * PAGE} tokens", found=most)
        if len(self.admission.waiting) >= self.limits.queue:
            self.totals.rejected += 1
            raise OverloadedError(f"{self.limits.queue} requests wait already", self.retry_after_s())
        sequence = self.pool.sequence(next(self._ids), request)
        self.admission.waiting.add(sequence)
        if request.deadline_s is not None:
            if len(self._deadlines) >= 2 * self._with_deadline + 64:  # mostly of requests that have ended
                self._deadlines = [one for one in self._deadlines if one[2].state is not State.ENDED]
                heapq.heapify(self._deadlines)
                self._with_deadline = len(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, sequence.id, sequence))
        return sequence

    def retry_after_s(self) -> float:
        """How long the queue may take, at least 1 s: by how fast answers ended, or by the work of its prompts."""
        if len(self._ends) > 1 and self._ends[-1] > self._ends[0]:
            seconds = len(self.admission.waiting) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        else:
            seconds = sum(self.cost.seconds(Load(prefill=sequence.left)) for sequence in self.admission.waiting)
        return min(_MAX_RETRY_S, max(1.0, seconds))

    def cancel(self, sequence: Sequence, finish: Finish = Finish.CANCELLED) -> Event | None:
        """End a sequence and release its pages; its part of a running step is discarded. None if it has ended.

        After an ERROR, which says that its numbers are wrong, its pages cannot be found either.
        """
        if sequence.state is State.ENDED:
            return None
        if finish is Finish.ERROR:
            self.tree.discard(sequence)
        sequence.finish = finish
        self.admission.end(sequence)
        return Event(sequence, [], finish)

    def expire(self, now: float) -> list[Event]:
        """End the sequences past their deadline."""
        events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            event = self.cancel(heapq.heappop(self._deadlines)[2], Finish.TIMEOUT)
            events += [event] if event is not None else []
        return events

    def plan(self, now: float) -> Step | None:
        """The next step, or None if no sequence can continue."""
        self._age_head(now)
        self._step = step = Step(now)
        self.admission.forking, self.held = 0, []
        self._searched_s = 0.0
        if self.searches:
            began = time.perf_counter()
            if self._draft():
                self._searched_s = time.perf_counter() - began
        self._plan_answers(step)
        self._make_place()
        self._plan_prompts(step, now)
        step.copies = self.pool.take_copies()
        return step if step.decode or step.prefill else None

    def _draft(self) -> bool:
        """Draft for running sequences where the expected gain pays for the extra rows -> whether any drafter ran."""
        running = self.admission.running
        room = min(MOST_DRAFTED, self.limits.decode_rows - len(running))
        if room <= 0 or all(one.request.drafter is None for one in running):
            return False
        load = Load(decode=len(running), decode_keys=sum(len(one.tokens) for one in running))
        if not self.cost.may_draft(load, room):
            return False
        drafts: list[Draft] = []
        tokens: list[tuple[float, int]] = []  # next of each draft: (minus its probability, index of its sequence)
        for index, one in enumerate(running):
            request, draft = one.request, Draft([], 0.0)
            if request.drafter is not None:
                left = min(request.max_tokens - one.answer, self.limits.context - len(one.tokens)) - 1
                draft = request.drafter.propose(one.tokens)
                draft = draft if len(draft.tokens) <= left else Draft(draft.tokens[: max(0, left)], draft.rate)
            drafts.append(draft)
            if draft.tokens:
                tokens.append((-draft.rate, index))
        heapq.heapify(tokens)
        gains: list[float] = []
        owners: list[int] = []
        counts = [0] * len(running)
        while tokens and len(gains) < room:
            gain, index = tokens[0]
            gains.append(-gain)
            owners.append(index)
            counts[index] += 1
            if counts[index] < len(drafts[index].tokens):
                heapq.heapreplace(tokens, (gain * drafts[index].rate, index))
            else:
                heapq.heappop(tokens)
        for index in owners[: self.cost.draft_rows(load, gains)]:
            one = running[index]
            one.draft = drafts[index].tokens[: len(one.draft) + 1]
        return True

    def _plan_answers(self, step: Step) -> None:
        """Plan a row, and a draft, of each running sequence, or its block."""
        running = self.admission.running
        if running and running[0].request.denoising is not None:
            self._blocks.plan_answers(step)
            return
        limit, slots = self.limits.recompute_above, self.pool.slots
        room = 0 if slots is None else self._slots_for_drafts()
        for sequence in filter(self._ready, list(self.admission.running)):
            if slots is not None:
                # A state at the end of a page may become a checkpoint: no draft goes beyond.
                border = PAGE - 1 - sequence.computed % PAGE
                sequence.draft = sequence.draft[: min(room, border)]
                room -= len(sequence.draft)
            if limit is not None and len(sequence.tokens) + len(sequence.draft) > limit >= sequence.decode_from:
                sequence.draft = []  # whose rows would have other frequencies
            while sequence.state is State.RUNNING and not self.tree.reserve(sequence, 1 + len(sequence.draft)):
                if sequence.draft:
                    sequence.draft = []
                else:
                    self.admission.preempt_for(sequence)
            if sequence.state is State.RUNNING:
                tokens = [sequence.tokens[-1], *sequence.draft]
                step.decode.append(DecodeRows(sequence, tokens, len(tokens)))

    def _slots_for_drafts(self) -> int:
        """Slots beyond those that answers, prompts and a request that waits need."""
        admission = self.admission
        answers = len(admission.running)
        needed = answers + 2 * len(admission.prefilling) + (answers + 2 if len(admission.waiting) else 0)
        return max(0, self.pool.available(len(self.pool.groups)) - needed)

    def _make_place(self) -> None:
        """Preempt a sequence that waits for its mask if a request without an answer needs its place."""
        held = [one for one in self.held if one.state is State.RUNNING]
        if held and self.admission.places <= 0 and any(not one.answer for one in self.admission.waiting):
            self.admission.preempt(held[-1])

    def _ready(self, sequence: Sequence) -> bool:
        ready = sequence.request.ready()
        if not ready:
            sequence.draft = []
            self.held.append(sequence)
        return ready

    def _plan_prompts(self, step: Step, now: float) -> None:
        """Plan what else fits: prompts, and preempted answers."""
        rows = self.limits.prefill_chunk
        ordered = self._ordered(now)
        if not ordered:
            self._head = None
            return
        load = step.load
        if step.decode or step.prefill:
            rows = self.cost.prompt_rows(load, self.limits.step_s, ordered[0].computed, rows)
        ordered = self._shorter_first(ordered, rows, now)
        decode_rows = self.limits.decode_rows - load.decode
        full = False  # no request overtakes one that has no room
        for sequence in filter(self._ready, ordered):
            if rows <= 0:
                break
            if _mixes(step, sequence):
                full = True  # nor one that waits for the next step
                continue
            if sequence.state is State.WAITING and (full or not self.admission.admit(sequence)):
                full = full or sequence.leader is None
                continue
            if sequence.request.denoising is not None:
                rows -= self._blocks.plan_prompt(step, sequence, rows)
            elif sequence.computed < sequence.decode_from:
                rows -= self._plan_prefill(step, sequence, rows)
            else:
                count = self._plan_decode(step, sequence, min(decode_rows, self.cost.decode_rows_for(rows)))
                decode_rows -= count
                rows -= -(-count * rows // self.cost.decode_rows_for(rows))

    def _ordered(self, now: float) -> list[Sequence]:
        """Prefilling sequences and requests that could be admitted now, with some more, by level."""
        admission = self.admission
        if not admission.prefilling and not len(admission.waiting):
            return []
        most = len(admission.prefilling) + max(0, admission.places) + _LOOK_AHEAD
        return list(itertools.islice(admission.waiting.by_level(now, admission.prefilling), most))

    def _shorter_first(self, ordered: list[Sequence], rows: int, now: float) -> list[Sequence]:
        """Put prompts at most half as long before a first one that exceeds a step, within its level and patience."""
        self._head = head = ordered[0]
        if head.left <= rows or head.passed_s >= PATIENCE_S:
            return ordered
        of_level = level(head, now)
        short = [2 * one.left <= head.left and level(one, now) == of_level for one in ordered]
        return sorted(itertools.compress(ordered, short), key=lambda one: one.left) + [
            one for one, passes in zip(ordered, short) if not passes
        ]

    def _age_head(self, now: float) -> None:
        """Count the last step for or against the long prompt that was first: it should have had half of the rows."""
        head, step = self._head, self._step
        if head is not None:
            own = sum(rows.rows for rows in step.prefill if rows.sequence is head)
            passed = 2 * own < sum(rows.rows for rows in step.prefill)
            elapsed = now - step.planned
            head.passed_s = head.passed_s + elapsed if passed else max(0.0, head.passed_s - elapsed)

    def _plan_prefill(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Plan rows of a prompt, up to the end of a page if not all -> how many.

        States in slots are computed in chunks that end with pages: no prompt is cut elsewhere, if steps have the rows.
        """
        begin, end = sequence.computed, sequence.decode_from
        if sequence.request.scored:
            room = self.limits.scored_rows - sum(one.rows for one in step.prefill if one.sequence.request.scored)
            if room < min(PAGE, end - begin):
                return 0
            rows = min(rows, room)
        if end - begin > rows:
            end = (begin + rows) // PAGE * PAGE
            if self.pool.slots is None or self.limits.prefill_chunk < PAGE:
                end = max(end, begin + min(rows, PAGE))
            end = self.tree.chunk_before(begin, end, sequence.request.borders)
        else:
            end = self.tree.checkpoint_before(begin, end, sequence.request.borders)
        least, uncut = 0, self.limits.whole_pictures and bool(sequence.request.pictures)
        if uncut:
            room = self.limits.prefill_chunk - sum(one.rows for one in step.prefill)
            end = whole_pictures(sequence.tokens, begin, end, begin + room)
            least = whole_pictures(sequence.tokens, begin, min(end, begin + 1), end) - begin
        count = self._reserve_some(step, sequence, end - begin, least) if end > begin else 0
        if count and uncut:
            count = whole_pictures(sequence.tokens, begin, begin + count, begin + count) - begin
        if count:
            ends = begin + count == len(sequence.tokens)
            drawing = (sequence, *self.admission.same_prompt(sequence)) if ends else ()
            step.prefill.append(PrefillRows(sequence, begin, count, drawing))
        return count

    def _plan_decode(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Plan rows of an answer that was preempted -> how many."""
        count = self._reserve_some(step, sequence, min(sequence.left, max(0, rows)))
        if count:
            begin = sequence.computed
            tokens = sequence.tokens[begin : begin + count]
            step.decode.append(DecodeRows(sequence, tokens, int(count == sequence.left)))
        return count

    def _reserve_some(self, step: Step, sequence: Sequence, rows: int, least: int = 0) -> int:
        """Reserve pages for `rows` rows, or fewer but `least`, or none if answers took those promised to a prompt ->
        how many.
        """
        admission = self.admission
        while rows and not self.tree.reserve(sequence, rows):
            if rows > max(PAGE, least):
                rows = max(least, (rows - 1) // PAGE * PAGE)
            elif step.decode or step.prefill or not admission.preempt_for(sequence):
                return 0
        return rows

    def _unplan(self, sequence: Sequence) -> None:
        """Remove the rows of a preempted sequence, if any were planned."""
        step = self._step
        step.decode = [rows for rows in step.decode if rows.sequence is not sequence]
        step.prefill = [rows for rows in step.prefill if rows.sequence is not sequence]

    def settle(
        self, step: Step, drawn: abc.Sequence[int], now: float, confidence: abc.Sequence[float] = ()
    ) -> list[Event]:
        """Apply a step's results: `drawn` has a token for each row with logits -> new tokens of each sequence.

        `confidence`: of tokens that are proposed for canvases.
        """
        swap, load = self.admission.swap, step.load
        elapsed = now - step.planned - (0.0 if swap is None else swap.take_seconds())
        self.cost.observe(load, elapsed)
        answers, drafted = len(step.decode), load.decode > len(step.decode)
        events: list[Event] = []
        at = 0
        for sequence, tokens, logits in step.decode:
            draft, got = sequence.draft, drawn[at : at + logits]
            at += logits
            if sequence.state is not State.ENDED:
                sequence.draft = []
                kept, rows = accepted(draft, got) if draft else got, len(tokens) - len(draft)
                if kept[:1] == [NOT_DRAWN]:
                    kept = []
                    self.pool.repeat(sequence, rows)
                if draft and kept:
                    self._count_draft(sequence, len(draft), len(kept) - 1)
                if kept or not got:
                    kept = sequence.push(kept, self.limits.context)
                    of_draft = max(0, len(kept) - 1)
                    self.pool.advance(sequence, rows + of_draft, of_draft, len(draft))
                self._got(sequence, kept, events, now)
                if draft:
                    self.pool.truncate(sequence, sequence.computed)
        if self._searched_s and step.decode and not step.prefill:
            saved = 0.0
            if drafted:
                alone = self.cost.decode_seconds(
                    Load(decode=answers, decode_keys=load.decode_keys * answers // load.decode)
                )
                saved = alone * sum(len(event.tokens) for event in events) / answers - (elapsed - self._searched_s)
            self._search.learn(self._searched_s, saved, elapsed)
        self.searches = self._search.pays()
        for part in step.prefill:
            sequence, _, count, drawing, _ = part
            begin, at = at, at + len(part.wanted)
            got = drawn[begin:at]
            if sequence.state is State.ENDED:
                continue
            if sequence.request.denoising is not None:
                self._got(sequence, self._blocks.settle(part, got, confidence[begin:at]), events, now)
                continue
            late = got[:1] == [NOT_DRAWN]
            if late and self.pool.slots is not None:  # those with the same prompt cannot fork, and keep waiting
                self.pool.repeat(sequence, count)
                continue
            self.pool.advance(sequence, count)
            if not drawing:
                self._got(sequence, (), events, now)
            started = [  # all of them before the first may end, which gives its pages back
                (one, token)
                for one, token in zip(drawing, got)
                if token != NOT_DRAWN and (one is sequence or self.admission.fork(sequence, one))
            ]
            for one, token in started:
                self._got(one, one.push((token,), self.limits.context), events, now)
            if late:
                sequence.computed -= 1
                self._got(sequence, (), events, now)
        return events

    def _count_draft(self, sequence: Sequence, drafted: int, right: int) -> None:
        self.totals.drafts += 1
        self.totals.drafted += drafted
        self.totals.accepted += right
        if sequence.request.drafter is not None:
            sequence.request.drafter.checked(drafted, right)

    def _got(self, sequence: Sequence, tokens: abc.Sequence[int], events: list[Event], now: float) -> None:
        """Follow up on rows of a sequence that were computed, and on its new tokens."""
        if sequence.computed // PAGE > sequence.shared:
            self.tree.add(sequence)
            self.tree.checkpoint(sequence)
        self.pool.slide(sequence)
        if tokens:
            self.totals.answer_tokens += len(tokens)
            events.append(Event(sequence, list(tokens), sequence.finish))
        if sequence.finish is not None:
            self._ends.append(now)
            self.admission.end(sequence)
        elif sequence.shift(self.limits.context) or self._crossed(sequence):
            self.pool.release(sequence)
            sequence.decode_from = len(sequence.tokens)
            self.admission.move(sequence, State.PREFILLING)
        elif sequence.request.denoising is not None:
            if is_ready(sequence):
                self.admission.move(sequence, State.RUNNING)
        elif sequence.left == 1 and sequence.computed >= sequence.decode_from:
            self.admission.move(sequence, State.RUNNING)

    def _crossed(self, sequence: Sequence) -> bool:
        """Whether RoPE's frequencies change from now on."""
        limit = self.limits.recompute_above
        return limit is not None and len(sequence.tokens) > limit >= sequence.decode_from


def _mixes(step: Step, sequence: Sequence) -> bool:
    """Whether rows of this prompt need another forward than those of the step: one takes pictures or adapters."""
    if sequence.request.pictures:
        return any(rows.sequence.request.adapter is not None for rows in step.prefill)
    return sequence.request.adapter is not None and any(rows.sequence.request.pictures for rows in step.prefill)
