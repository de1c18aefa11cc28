"""Drafts by the EAGLE-3 head of a bundle (Li et al. 2025), whose one layer has a KV cache of its own.

Entry p of that cache is made of the model's hidden states at position p and of the token at p + 1, so a sequence of the
head has the tokens of the answer without the first one. Entries of prompts are computed as the model computes them;
those of answers wait on the host until something is drafted. The head drafts each token from its own state at the one
before, and these entries are replaced by those of the model's states once it has computed them.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.devices.base import Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.sampler import Sampler
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.draft_model import DraftSource, ModelDrafter
from mlcpipe.runtime.serving.executor import HiddenRows
from mlcpipe.runtime.serving.page_pool import PageGroup, PagePool
from mlcpipe.runtime.serving.prefix_tree import PrefixTree
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence, State
from tir_schedules.step_layout import PAGE

_MAX_DECODE_ROWS = 4  # waiting rows of an answer that decode computes; more are computed as a prompt
_MAX_WAITING = 512  # rows of an answer, after which the head starts over

Rows = NDArray[np.float32]


@dataclass(eq=False)
class DraftSequence:
    """The head's sequence for an answer. Its token i is the answer's at i + 1 + `offset`: some entries may be missing.

    `waiting`: hidden rows f32[n, width] of its last tokens, which have no entries yet.
    """

    sequence: Sequence
    offset: int
    dropped: int
    waiting: list[Rows] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The position in the answer of the next entry."""
        return len(self.sequence.tokens) + self.offset


class EagleDraft(DraftSource):
    """The head of the bundle of `core`, with a cache of `kv_tokens` tokens; steps then keep hidden rows for it."""

    name = "the EAGLE head"

    def __init__(self, core: Core, kv_tokens: int) -> None:
        super().__init__(CostModel())
        bundle, model = core.bundle, core.bundle.manifest.model
        assert model.eagle is not None
        self._core, self._device, self._sampler = core, bundle.device, Sampler(bundle)
        self._context = core.scheduler.limits.context
        core.executor.keep_hidden(model.eagle.kept, prompts=True)
        self._pool = PagePool([PageGroup(-(-kv_tokens // PAGE))])
        self._tree = PrefixTree(self._pool)
        self._followers: dict[Sequence, DraftSequence] = {}
        self._ids, self._step = itertools.count(), StepBuffer()
        with bundle.device.errors():
            self._prompt, self._first, self._next = (
                bundle.library.vm[f"draft_{name}"] for name in ("prompt", "first", "next")
            )
            handle, eagle = bundle.device.handle, model.eagle
            count = self._pool.groups[0].pages
            self._pages = tvm_ffi.convert([tvm_runtime.empty((count, eagle.page_bytes), "int8", handle)])
            self._hidden = tvm_runtime.empty((model.max_batch, eagle.hidden_size), "float32", handle)
            self._logits = tvm_runtime.empty((model.max_batch, model.vocab_size), "float32", handle)
            self._numbers = {name: Reused(bundle.device, "int32") for name in ("tokens", "rows", "step")}
            self._features = Reused(bundle.device, "float32")

    def _load(self, rows: int, keys: int) -> Load:
        return Load(decode=rows, decode_keys=keys)

    def _follow_step(self) -> None:
        for one in [one for one in self._followers if one.state in (State.WAITING, State.ENDED)]:
            self._release(one)
        executor = self._core.executor
        with self._device.errors():
            self._follow_prompts(_first_rows(self._of_followed(executor.prompt_hidden_rows)))
            began = time.perf_counter()
            self._follow_answers(self._of_followed(executor.hidden_rows))
            self._followed_s = time.perf_counter() - began
        executor.hidden_rows, executor.prompt_hidden_rows = {}, {}

    def _of_followed(self, kept: dict[Sequence, HiddenRows]) -> dict[Sequence, HiddenRows]:
        return {
            one: rows for one, rows in kept.items() if one.state is not State.ENDED and self._follows(one) is not None
        }

    def _follow_prompts(self, kept: dict[Sequence, HiddenRows]) -> None:
        """Store entries of prompts, from the rows on the device; existing ones are replaced by equal ones."""
        if not kept:
            return
        followers = {one: self._follow(one, rows.position, rows.size)[0] for one, rows in kept.items()}
        pairs = [(followers[one], rows) for one, rows in kept.items()]
        spans = [Span(one.sequence, rows.position - one.offset, rows.size) for one, rows in pairs]
        if any(one.begin < 0 or not self._reserve(one.sequence, len(one.sequence.tokens)) for one in spans):
            for one in followers:
                self._release(one)
            return
        hidden = self._core.executor.hidden_of_prompts
        width = hidden.shape[1]
        tokens = [token for one, (_, at, size) in kept.items() for token in one.tokens[at + 1 : at + size + 1]]
        self._store(spans, tokens, tvm_runtime.view(hidden, (len(tokens), width)))
        for one, follower in followers.items():
            mine, rows = follower.sequence, kept[one]
            mine.computed, follower.waiting = len(mine.tokens), []
            if one.state is State.RUNNING:  # the first draft is guessed from the last row
                last = rows.row + rows.size - 1
                row = tvm_runtime.view(hidden, (1, width), last * width * 4)
                follower.waiting.append(tvm_runtime.array(self._device.read(row)).copy())
                mine.computed -= 1
            self._add(follower)

    def _follow_answers(self, kept: dict[Sequence, HiddenRows]) -> None:
        """Queue the rows of answers."""
        stand = {one: min(rows.size, one.computed - rows.position) for one, rows in kept.items()}
        stand = {one: count for one, count in stand.items() if count > 0 and one.state is not State.ENDED}
        if not stand:
            return
        hidden = self._core.executor.hidden
        total = max(kept[one].row + count for one, count in stand.items())
        found = tvm_runtime.array(self._device.read(tvm_runtime.view(hidden, (total, hidden.shape[1]))))
        for one, count in stand.items():
            follower, new = self._follow(one, kept[one].position, count)
            if new:
                end = kept[one].row + count
                follower.waiting.append(found[end - new : end].copy())
            if len(follower.sequence.tokens) - follower.sequence.computed > _MAX_WAITING:
                self._release(one)

    def _follow(self, one: Sequence, begin: int, rows: int) -> tuple[DraftSequence, int]:
        """The draft sequence of `one` up to the end of its `rows` rows from `begin` on; how many tokens are new."""
        follower = self._followers.get(one)
        if follower is not None and follower.dropped != one.dropped:
            self._release(one)
            follower = None
        if follower is None:
            adapter, text = one.request.adapter, one.tokens
            family = one.request.namespace, 0 if adapter is None else adapter.serial, one.dropped, text[0]
            mine = self._pool.sequence(next(self._ids), ScheduledRequest((text[0],), 1, namespace=family))
            mine.tokens, mine.decode_from = text[1:], 0
            del mine.tokens[self._tree.take(mine) :]
            follower = self._followers[one] = DraftSequence(mine, 0, one.dropped)
        follower.offset += max(0, begin - follower.end)
        new = one.tokens[follower.end + 1 : begin + rows + 1]
        follower.sequence.tokens += new
        return follower, len(new)

    def _add(self, follower: DraftSequence) -> None:
        """Make its full pages findable, if no entry is missing."""
        if not follower.offset:
            self._tree.add(follower.sequence)

    def _reserve(self, mine: Sequence, end: int) -> bool:
        """Pages for the first `end` entries of a sequence."""
        rows = end - mine.computed
        return rows <= 0 or self._pool.reserve(mine, rows) or (
            self._tree.evict(max(0, count) for count in self._pool.missing(mine, rows))
            and self._pool.reserve(mine, rows)
        )  # fmt: skip

    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        ready = [
            (one, drafter, follower)
            for one, drafter in pairs
            if (follower := self._followers.get(one)) is not None and self._is_ready(one, follower, length)
        ]
        if not ready:
            return
        self._rounds += 1
        began, drafts = time.perf_counter(), [[] for _ in ready]  # type: tuple[float, list[list[int]]]
        followers = [follower for *_, follower in ready]
        with self._device.errors():
            for follower in followers:
                if len(follower.sequence.tokens) - follower.sequence.computed > _MAX_DECODE_ROWS:
                    self._catch_up(follower)
            logits = self._guess_first(followers)
            for at in range(length):
                settings = [drafter.row.after(draft) for (_, drafter, _), draft in zip(ready, drafts)]
                self._sampler.prepare(settings, [one.dropped + len(one.tokens) + at for one, *_ in ready])
                drawn = tvm_runtime.array(self._device.read(self._sampler.sample(logits))).tolist()
                for draft, token in zip(drafts, drawn):
                    draft.append(max(token, 0))
                if at < length - 1:
                    logits = self._guess_next(followers, drafts)
        load = self._load(len(ready), sum(len(follower.sequence.tokens) for follower in followers))
        self._cost.observe(load, (time.perf_counter() - began) / length)
        for (one, drafter, follower), draft in zip(ready, drafts):
            drafter.hold(draft, len(one.tokens))
            self._pool.truncate(follower.sequence, follower.sequence.computed)
            self._add(follower)

    def _is_ready(self, one: Sequence, follower: DraftSequence, length: int) -> bool:
        """Whether the draft sequence is up to date and has room for a draft."""
        mine, room = follower.sequence, len(one.tokens) + length < self._context
        waiting = sum(map(len, follower.waiting))
        return (
            room and follower.end == len(one.tokens) - 1 and 0 < waiting == len(mine.tokens) - mine.computed
            and self._reserve(mine, len(mine.tokens) + length - 1)
        )  # fmt: skip

    def _catch_up(self, follower: DraftSequence) -> None:
        """Store entries of all waiting rows but the last, a chunk at a time."""
        mine, rows = follower.sequence, np.concatenate(follower.waiting)
        chunk = self._core.bundle.manifest.model.prefill_chunk
        for begin in range(0, len(rows) - 1, chunk):
            part = rows[begin : min(begin + chunk, len(rows) - 1)]
            tokens = mine.tokens[mine.computed : mine.computed + len(part)]
            self._store([Span(mine, mine.computed, len(part))], tokens, self._device.tensor(part))
            mine.computed += len(part)
        follower.waiting = [rows[-1:]]

    def _store(self, spans: list[Span], tokens: list[int], features: Any) -> None:
        step = self._device.tensor(self._step.fill(spans))
        ids = self._device.tensor(np.array(tokens, np.int32))
        self._prompt(ids, features, step, self._pages, self._core.bundle.params)

    def _guess_first(self, followers: list[DraftSequence]) -> Any:
        """Logits f32[d, V] after the last token of each; stores entries of the waiting rows."""
        spans = [Span(one.sequence, one.sequence.computed, sum(map(len, one.waiting))) for one in followers]
        tokens = [token for one in followers for token in one.sequence.tokens[one.sequence.computed :]]
        features = self._features.put(np.concatenate([rows for one in followers for rows in one.waiting]))
        last = np.cumsum([span.rows for span in spans]) - 1
        hidden, logits = self._out(len(followers))
        self._first(
            self._put("tokens", tokens), features, self._put("rows", last), hidden,
            self._put("step", self._step.fill(spans)), logits, self._pages, self._core.bundle.params,
        )  # fmt: skip
        for one in followers:
            one.sequence.computed, one.waiting = len(one.sequence.tokens), []
        return logits

    def _guess_next(self, followers: list[DraftSequence], drafts: list[list[int]]) -> Any:
        """Logits f32[d, V] after the last token of each draft."""
        spans = [Span(one.sequence, one.sequence.computed + len(draft) - 1, 1) for one, draft in zip(followers, drafts)]
        hidden, logits = self._out(len(followers))
        tokens, step = self._put("tokens", [draft[-1] for draft in drafts]), self._put("step", self._step.fill(spans))
        self._next(tokens, hidden, step, logits, self._pages, self._core.bundle.params)
        return logits

    def _put(self, name: str, values: Any) -> Any:
        return self._numbers[name].put(np.asarray(values, np.int32))

    def _out(self, rows: int) -> tuple[Any, Any]:
        return tuple(tvm_runtime.view(one, (rows, one.shape[1])) for one in (self._hidden, self._logits))

    def _release(self, one: Sequence) -> None:
        self._pool.release(self._followers.pop(one).sequence)


def _first_rows(kept: dict[Sequence, HiddenRows]) -> dict[Sequence, HiddenRows]:
    """Those up to a gap: kernels take rows from the first on."""
    end, found = 0, {}
    for one, rows in kept.items():
        if rows.row != end:
            break
        found[one], end = rows, end + rows.size
    return found
