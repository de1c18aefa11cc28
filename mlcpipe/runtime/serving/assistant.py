"""Drafts by a Gemma 4 assistant in the bundle, whose layers read the keys that the model's steps have stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.cost_model import Load
from mlcpipe.runtime.serving.draft_heads import RowDrafts
from mlcpipe.runtime.serving.sequence import Sequence


class AssistantDraft(RowDrafts):
    """The assistant of the bundle of `core`. It keeps nothing of its own from draft to draft."""

    name = "the assistant"

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        info = core.bundle.manifest.model.assistant
        assert info is not None
        self._width, self._step = info.width, StepBuffer()
        with self._device.errors():
            self._function = core.bundle.library.vm["draft_from"]

    def _load(self, rows: int, keys: int) -> Load:
        return Load(decode=rows, decode_keys=keys)

    def _begin(self, ready: list[tuple[Sequence, int]]) -> None:
        executor, device, rows = self._core.executor, self._device, [row for _, row in ready]
        kept = executor.hidden.shape[1]
        found = tvm_runtime.array(device.read(tvm_runtime.view(executor.hidden, (max(rows) + 1, kept))))
        hidden = np.zeros((len(rows), self._width), np.float32)
        hidden[:, :kept] = found[rows]
        self._hidden, self._last = device.tensor(hidden), [one.tokens[-1] for one, _ in ready]
        # The last token has no keys yet: rows are those of the one before it.
        self._integers = device.tensor(self._step.fill([Span(one, len(one.tokens) - 2, 1) for one, _ in ready]))

    def _guess(self, at: int, drafts: list[list[int]]) -> Any:
        tokens = [draft[-1] for draft in drafts] if at else self._last
        ids, logits = self._device.tensor(np.array(tokens, np.int32)), self._logits_of(len(tokens))
        executor, params = self._core.executor, self._core.bundle.params
        self._function(ids, self._hidden, self._integers, logits, executor.states, params)
        return logits
