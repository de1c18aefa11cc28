"""Who computes what in the next step. No device, and no clock but to see what looking for drafts takes.

Who has begun to answer goes on: one row each in every step. Prompts fill up what time is left until `step_s`. A prompt
gets its pages when it is admitted; where answers grow beyond what there is, the youngest of the lowest class gives way.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Sequence as Many

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Search
from mlcpipe.runtime.serving.interface import OverloadedError
from mlcpipe.runtime.serving.limits import Limits, Totals
from mlcpipe.runtime.serving.page_pool import PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.residency import Residency
from mlcpipe.runtime.serving.sequence import Finish, Request, Sequence, State
from mlcpipe.runtime.serving.step import NOT_DRAWN, Event, FewRows, ManyRows, Step, accepted
from mlcpipe.runtime.serving.waiting import level
from tir_schedules.step_layout import PAGE

PATIENCE_S = 2.0  # that shorter prompts may go before a long one
_LOOK_AHEAD = 16  # waiting requests beyond the free places that are looked at for shorter prompts
_MAX_RETRY_S = 60.0


class Scheduler:
    """Call `expire`, `plan`, compute the step, `settle`, again and again.

    `submit` and `cancel` may come between any two of them, also while the device computes, but before or after the
    tables of a step are read. What a step computed for a cancelled sequence is thrown away.

    All times are seconds on the caller's clock, that of `Request.arrival`.
    """

    def __init__(self, pool: PagePool, tree: PrefixTree, cost: CostModel, limits: Limits) -> None:
        self.pool, self.tree, self.cost, self.limits = pool, tree, cost, limits
        self.totals = Totals()
        self.residency = Residency(pool, tree, limits, self.totals)
        self.residency.on_preemption = self._unplan
        self._ids = itertools.count()
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._with_deadline = 0  # of them, when the ended ones were last removed
        self._ends: deque[float] = deque(maxlen=32)
        self._head: Sequence | None = None  # the long prompt that the last step had for first
        self._step = Step(0.0)  # the one being planned
        self._search, self._searched_s = Search(), 0.0
        self.searches = True  # for drafts, in the next step
        self.held: list[Sequence] = []  # who was left out of the last plan for not being ready

    @property
    def has_work(self) -> bool:
        """Whether `plan` has somebody to plan for."""
        return bool(self.residency.running or self.residency.prefilling or len(self.residency.waiting))

    def submit(self, request: Request) -> Sequence:
        """The request waits. Raises UsageError where it could never be served, OverloadedError where too many wait."""
        tokens, context = len(request.tokens), self.limits.context
        if tokens >= context:
            raise UsageError("the prompt is too long", expected=f"less than {context} tokens", found=tokens)
        most = min(context, tokens + request.max_tokens)
        for about in self.pool.groups:
            if about.most(most, self.limits.prefill_chunk) > about.pages:
                raise UsageError("prompt and answer", expected=f"at most {about.pages * PAGE} tokens", found=most)
        if len(self.residency.waiting) >= self.limits.queue:
            self.totals.rejected += 1
            raise OverloadedError(f"{self.limits.queue} requests wait already", self.retry_after_s())
        sequence = self.pool.sequence(next(self._ids), request)
        self.residency.waiting.add(sequence)
        if request.deadline_s is not None:
            if len(self._deadlines) >= 2 * self._with_deadline + 64:  # mostly of requests that have ended
                self._deadlines = [one for one in self._deadlines if one[2].state is not State.ENDED]
                heapq.heapify(self._deadlines)
                self._with_deadline = len(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, sequence.id, sequence))
        return sequence

    def retry_after_s(self) -> float:
        """How long the queue may take, from 1 s on: by how fast answers ended lately, or by the work of its prompts."""
        if len(self._ends) > 1 and self._ends[-1] > self._ends[0]:
            seconds = len(self.residency.waiting) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        else:
            seconds = sum(self.cost.seconds(Load(many=sequence.left)) for sequence in self.residency.waiting)
        return min(_MAX_RETRY_S, max(1.0, seconds))

    def cancel(self, sequence: Sequence, finish: Finish = Finish.CANCELLED) -> Event | None:
        """End a sequence and give its pages back; what is under way for it is thrown away. None if it has ended.

        After an ERROR, which says that its numbers are wrong, nobody finds its pages either.
        """
        if sequence.state is State.ENDED:
            return None
        if finish is Finish.ERROR:
            self.tree.discard(sequence)
        sequence.finish = finish
        self.residency.end(sequence)
        return Event(sequence, [], finish)

    def expire(self, now: float) -> list[Event]:
        """End those whose deadline has come."""
        events = []
        while self._deadlines and self._deadlines[0][0] <= now:
            event = self.cancel(heapq.heappop(self._deadlines)[2], Finish.TIMEOUT)
            events += [event] if event is not None else []
        return events

    def plan(self, now: float) -> Step | None:
        """The next step, or None where nobody can go on."""
        self._age_head(now)
        self._step = step = Step(now)
        self.residency.forking, self.held = 0, []
        self._searched_s = 0.0
        if self.searches:
            began = time.perf_counter()
            if self._draft():
                self._searched_s = time.perf_counter() - began
        self._plan_answers(step)
        self._make_place()
        self._plan_prompts(step, now)
        step.copies = self.pool.take_copies()
        return step if step.few or step.many else None

    def _draft(self) -> bool:
        """Drafts for who answers, of the tokens that are worth their rows -> whether they were looked for."""
        running = self.residency.running
        room = min(MOST_DRAFTED, self.limits.few_rows - len(running))
        if room <= 0 or all(one.request.drafter is None for one in running):
            return False
        load = Load(few=len(running), few_keys=sum(len(one.tokens) for one in running))
        if not self.cost.may_draft(load, room):
            return False
        drafts: list[Draft] = []
        tokens: list[tuple[float, int]] = []  # of each draft the next one: (minus how likely it stands, whose it is)
        for index, one in enumerate(running):
            request, draft = one.request, Draft([], 0.0)
            if request.drafter is not None and self.pool.slots is None:  # states in slots do not go back
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
        """A row, and a draft, of each who answers."""
        limit = self.limits.recompute_above
        for sequence in filter(self._ready, list(self.residency.running)):
            if limit is not None and len(sequence.tokens) + len(sequence.draft) > limit >= sequence.few_from:
                sequence.draft = []  # whose rows would be of other frequencies
            while sequence.state is State.RUNNING and not self.tree.reserve(sequence, 1 + len(sequence.draft)):
                if sequence.draft:
                    sequence.draft = []
                else:
                    self.residency.give_way(sequence)
            if sequence.state is State.RUNNING:
                tokens = [sequence.tokens[-1], *sequence.draft]
                step.few.append(FewRows(sequence, tokens, len(tokens)))

    def _make_place(self) -> None:
        """Preempt a sequence that waits for its mask if a request without an answer needs its place."""
        held = [one for one in self.held if one.state is State.RUNNING]
        if held and self.residency.places <= 0 and any(not one.answer for one in self.residency.waiting):
            self.residency.preempt(held[-1])

    def _ready(self, sequence: Sequence) -> bool:
        ready = sequence.request.ready()
        if not ready:
            self.held.append(sequence)
        return ready

    def _plan_prompts(self, step: Step, now: float) -> None:
        """What else fits: prompts, and answers of who was preempted."""
        rows = self.limits.prefill_chunk
        ordered = self._ordered(now)
        if not ordered:
            self._head = None
            return
        load = step.load
        if step.few:
            rows = self.cost.prompt_rows(load, self.limits.step_s, ordered[0].computed, rows)
        ordered = self._shorter_first(ordered, rows, now)
        few_rows = self.limits.few_rows - load.few
        full = False  # nobody passes a request for which there is no room
        for sequence in filter(self._ready, ordered):
            if rows <= 0:
                break
            if sequence.state is State.WAITING and (full or not self.residency.admit(sequence)):
                full = full or sequence.behind is None
                continue
            if sequence.computed < sequence.few_from:
                rows -= self._plan_many(step, sequence, rows)
            else:
                count = self._plan_few(step, sequence, min(few_rows, self.cost.few_rows_for(rows)))
                few_rows -= count
                rows -= -(-count * rows // self.cost.few_rows_for(rows))

    def _ordered(self, now: float) -> list[Sequence]:
        """Prompts under way and requests that could be admitted now, with some more, by level."""
        residency = self.residency
        if not residency.prefilling and not len(residency.waiting):
            return []
        most = len(residency.prefilling) + max(0, residency.places) + _LOOK_AHEAD
        return list(itertools.islice(residency.waiting.by_level(now, residency.prefilling), most))

    def _shorter_first(self, ordered: list[Sequence], rows: int, now: float) -> list[Sequence]:
        """A prompt of more than a step lets those of its level that are half as long pass, while its patience lasts."""
        self._head = head = ordered[0]
        if head.left <= rows or head.passed_s >= PATIENCE_S:
            return ordered
        of_level = level(head, now)
        short = [2 * one.left <= head.left and level(one, now) == of_level for one in ordered]
        return sorted(itertools.compress(ordered, short), key=lambda one: one.left) + [
            one for one, passes in zip(ordered, short) if not passes
        ]

    def _age_head(self, now: float) -> None:
        """Count the last step for or against the long prompt that was first in it: it should have half of the rows."""
        head, step = self._head, self._step
        if head is not None:
            own = sum(many.rows for many in step.many if many.sequence is head)
            passed = 2 * own < sum(many.rows for many in step.many)
            elapsed = now - step.planned
            head.passed_s = head.passed_s + elapsed if passed else max(0.0, head.passed_s - elapsed)

    def _plan_many(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Rows of a prompt, up to the end of a page if not all -> how many."""
        begin, end = sequence.computed, sequence.few_from
        if end - begin > rows:
            end = max((begin + rows) // PAGE * PAGE, begin + min(rows, PAGE))
        else:
            end = self.tree.checkpoint_before(begin, end)
        count = self._reserve_some(step, sequence, end - begin)
        if count:
            ends = begin + count == len(sequence.tokens)
            drawing = (sequence, *self.residency.alike(sequence)) if ends else ()
            step.many.append(ManyRows(sequence, begin, count, drawing))
        return count

    def _plan_few(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Rows of an answer that was preempted -> how many."""
        count = self._reserve_some(step, sequence, min(sequence.left, max(0, rows)))
        if count:
            begin = sequence.computed
            tokens = sequence.tokens[begin : begin + count]
            step.few.append(FewRows(sequence, tokens, int(count == sequence.left)))
        return count

    def _reserve_some(self, step: Step, sequence: Sequence, rows: int) -> int:
        """Pages for so many rows, or for less, or for none where answers took what a prompt was promised."""
        residency = self.residency
        while rows and not self.tree.reserve(sequence, rows):
            if rows > PAGE:
                rows = (rows - 1) // PAGE * PAGE
            elif step.few or step.many or not residency.give_way(sequence):
                return 0
        return rows

    def _unplan(self, sequence: Sequence) -> None:
        """The sequence gives way, perhaps after its rows were planned."""
        step = self._step
        step.few = [rows for rows in step.few if rows.sequence is not sequence]
        step.many = [rows for rows in step.many if rows.sequence is not sequence]

    def settle(self, step: Step, drawn: Many[int], now: float) -> list[Event]:
        """`drawn` has a token for each row with logits -> what each sequence got."""
        swap, load = self.residency.swap, step.load
        elapsed = now - step.planned - (0.0 if swap is None else swap.take_seconds())
        self.cost.observe(load, elapsed)
        answers, drafted = len(step.few), load.few > len(step.few)
        events: list[Event] = []
        at = 0
        for sequence, tokens, logits in step.few:
            draft, got = sequence.draft, drawn[at : at + logits]
            at += logits
            if sequence.state is not State.ENDED:
                sequence.draft = []
                kept = accepted(draft, got) if draft else got
                if kept[:1] == [NOT_DRAWN]:
                    kept = []
                    self.pool.repeat(sequence, len(tokens) - len(draft))
                else:
                    self.pool.advance(sequence, len(tokens) - len(draft))
                if draft and kept:
                    self._count_draft(sequence, len(draft), len(kept) - 1)
                self._got(sequence, kept, events, now)
                if draft:
                    self.pool.truncate(sequence, sequence.computed)
        if self._searched_s and step.few and not step.many:
            saved = 0.0
            if drafted:
                alone = self.cost.few_seconds(Load(few=answers, few_keys=load.few_keys * answers // load.few))
                saved = alone * sum(len(event.tokens) for event in events) / answers - (elapsed - self._searched_s)
            self._search.learn(self._searched_s, saved, elapsed)
        self.searches = self._search.pays()
        for sequence, _, count, drawing in step.many:
            got = drawn[at : at + len(drawing)]
            at += len(drawing)
            if sequence.state is State.ENDED:
                continue
            late = got[:1] == [NOT_DRAWN]
            if late and self.pool.slots is not None:  # who waits with the same prompt cannot fork, and waits on
                self.pool.repeat(sequence, count)
                continue
            self.pool.advance(sequence, count)
            if not drawing:
                self._got(sequence, (), events, now)
            for one, token in zip(drawing, got):
                if token != NOT_DRAWN and (one is sequence or self.residency.fork(sequence, one)):
                    self._got(one, (token,), events, now)
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

    def _got(self, sequence: Sequence, tokens: Many[int], events: list[Event], now: float) -> None:
        """The sequence was computed further; of the drawn tokens all but the last are computed too."""
        pushed: list[int] = []
        for token in tokens:
            sequence.push(token, self.limits.context)
            pushed.append(token)
            if sequence.finish is not None:
                break
        if len(pushed) > 1:
            sequence.computed += len(pushed) - 1
        if sequence.computed // PAGE > sequence.shared:
            self.tree.add(sequence)
            self.tree.checkpoint(sequence)
        self.pool.slide(sequence)
        if pushed:
            self.totals.answer_tokens += len(pushed)
            events.append(Event(sequence, pushed, sequence.finish))
        if sequence.finish is not None:
            self._ends.append(now)
            self.residency.end(sequence)
        elif sequence.shift(self.limits.context) or self._crossed(sequence):
            self.pool.release(sequence)
            sequence.few_from = len(sequence.tokens)
            self.residency.move(sequence, State.PREFILLING)
        elif sequence.left == 1 and sequence.computed >= sequence.few_from:
            self.residency.move(sequence, State.RUNNING)

    def _crossed(self, sequence: Sequence) -> bool:
        """Whether RoPE's frequencies are others from now on."""
        limit = self.limits.recompute_above
        return limit is not None and len(sequence.tokens) > limit >= sequence.few_from
