"""Drafts by the Medusa heads of a bundle (Cai et al. 2024): chains from the hidden rows of the last step.

Head i samples the token i + 1 places after the last one as the model will, with its settings and random numbers. Heads
read no drafted token, so decode rows are all that they need. They pay for up to a few answers at a time, where no
EAGLE-3 head is at hand: those draft better.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

import numpy as np

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.sampler import Sampler
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.draft_model import DraftSource, ModelDrafter
from mlcpipe.runtime.serving.sequence import Sequence


class RowDrafts(DraftSource):
    """What drafts from the hidden rows that decode steps of the bundle of `core` keep from now on."""

    def __init__(self, core: Core) -> None:
        super().__init__(CostModel())
        self._core, self._device, self._sampler = core, core.bundle.device, Sampler(core.bundle)
        model = core.bundle.manifest.model
        core.executor.keep_hidden(model.hidden_size)
        with self._device.errors():
            self._logits = tvm_runtime.empty((model.max_batch, model.vocab_size), "float32", self._device.handle)

    @abstractmethod
    def _begin(self, ready: list[tuple[Sequence, int]]) -> None:
        """Prepare drafts of these answers, with the kept row that the last token of each was sampled from."""

    @abstractmethod
    def _guess(self, at: int, drafts: list[list[int]]) -> Any:
        """Logits f32[d, V] after the last tokens and `at` drafted ones of each, valid until the next call."""

    def _logits_of(self, rows: int) -> Any:
        return tvm_runtime.view(self._logits, (rows, self._logits.shape[1]))

    def _draft(self, pairs: list[tuple[Sequence, ModelDrafter]], length: int) -> None:
        context = self._core.scheduler.limits.context
        ready = [
            (one, drafter, row)
            for one, drafter in pairs
            if (row := self._row(one)) is not None and len(one.tokens) + length < context
        ]
        if not ready:
            return
        self._rounds += 1
        began, drafts = time.perf_counter(), [[] for _ in ready]  # type: tuple[float, list[list[int]]]
        with self._device.errors():
            self._begin([(one, row) for one, _, row in ready])
            for at in range(length):
                settings = [drafter.row.after(draft) for (_, drafter, _), draft in zip(ready, drafts)]
                self._sampler.prepare(settings, [one.dropped + len(one.tokens) + at for one, *_ in ready])
                drawn = self._sampler.sample(self._guess(at, drafts))
                for draft, token in zip(drafts, tvm_runtime.array(self._device.read(drawn)).tolist()):
                    draft.append(max(token, 0))
        load = self._load(len(ready), sum(len(one.tokens) for one, *_ in ready))
        self._cost.observe(load, (time.perf_counter() - began) / length)
        for (one, drafter, _), draft in zip(ready, drafts):
            drafter.hold(draft, len(one.tokens))

    def _row(self, one: Sequence) -> int | None:
        """The kept row that the last token was sampled from, if there is one."""
        rows = self._core.executor.hidden_rows.get(one)
        at = -1 if rows is None else len(one.tokens) - 2 - rows.position
        return rows.row + at if rows is not None and 0 <= at < rows.size else None


class DraftHeads(RowDrafts):
    """The Medusa heads of the bundle of `core`."""

    name = "the draft heads"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.most = core.bundle.manifest.model.draft_heads
        with self._device.errors():
            self._heads = [core.bundle.library.vm[f"draft_head_{head}"] for head in range(self.most)]

    def logits(self, head: int, rows: Any) -> Any:
        """Logits f32[r, V] of a head for rows i32[r] of the kept ones, valid until the next call."""
        logits = self._logits_of(rows.shape[0])
        self._heads[head](self._core.executor.hidden, rows, logits, self._core.bundle.params)
        return logits

    def _load(self, rows: int, keys: int) -> Load:
        return Load(decode=rows)

    def _begin(self, ready: list[tuple[Sequence, int]]) -> None:
        self._rows = self._device.tensor(np.array([row for _, row in ready], np.int32))

    def _guess(self, at: int, drafts: list[list[int]]) -> Any:
        return self.logits(at, self._rows)
