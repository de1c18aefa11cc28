"""A model that hears: one window of sound at a time, and sequences of text that attend to it."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.memory import MOST_ANSWERS
from mlcpipe.bundle.model_info import SpeechInfo
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from mlcpipe.runtime.serving.sequence import Sequence as Tokens
from tir_schedules.step_layout import (
    HEADER,
    KEYS,
    PAGE,
    PLACE,
    POSITION,
    ROPE_LENGTH,
    ROW_BEGIN,
    ROWS,
    SEQUENCE,
    SEQUENCES,
    TABLE_BEGIN,
    TABLES,
)

Floats = NDArray[np.float32]


def sound_step(rows: int, keys: int) -> NDArray[np.int32]:
    """The step of `rows` rows of one sequence that attend to all `keys` keys, in pages from 0 on, and add none."""
    pages = -(-keys // PAGE)
    parts = {
        POSITION: np.full(rows, keys - 1), PLACE: np.full(rows, -1), ROW_BEGIN: np.array([0, rows]),
        KEYS: np.array([keys]), TABLE_BEGIN: np.array([0, pages]), ROPE_LENGTH: np.full(rows, keys),
        SEQUENCE: np.zeros(rows), TABLES: np.arange(pages),
    }  # fmt: skip
    header, at = np.zeros(HEADER, np.int32), HEADER
    header[SEQUENCES], header[ROWS] = 1, rows
    for name, values in parts.items():
        header[name] = at
        at += len(values)
    return np.concatenate((header, *parts.values())).astype(np.int32)


class Stopped(Exception):
    """Nobody waits for the window that is heard."""


class Hearing:
    """The library's functions. Callers hold `lock` from `listen` to the last step of that window.

    Whoever holds it may set `stopped`: where that is true, functions raise Stopped instead of computing.
    """

    def __init__(self, bundle: LoadedBundle, info: SpeechInfo) -> None:
        self._bundle, self._device, self.info = bundle, bundle.device, info
        self.lock = threading.Lock()
        self.stopped: Callable[[], bool] = bool
        self._step, self._decode_steps = StepBuffer(), dict[int, NDArray[np.int32]]()
        manifest, handle = bundle.manifest, bundle.device.handle
        self._context, self._vocab = bundle.context_length, manifest.model.vocab_size
        self._each = -(-self._context // PAGE)  # pages of an answer
        window = -(-info.rows // PAGE)
        empty = tvm_runtime.empty
        with self._device.errors():
            self._text, self._sound, self._encoder = (
                tvm_ffi.convert([empty((pages, one.unit_items), one.dtype, handle) for one in states])
                for pages, states in (
                    (MOST_ANSWERS * self._each, manifest.states), (window, info.sound), (window, info.encoder)
                )
            )  # fmt: skip
            self._heard = empty((info.rows, manifest.model.hidden_size), "float32", handle)
            self._logits = empty((MOST_ANSWERS, self._vocab), "float32", handle)

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer."""
        return self._context

    def listen(self, features: Floats) -> Floats:
        """Hear a window f32[2 * rows, mels] -> the encoder's rows f32[rows, hidden], valid until the next window.

        The window's keys and values are written here, once. Raises ComputeError for numbers that are not finite.
        """
        self._go_on()
        rows, device, vm = self.info.rows, self._device, self._bundle.library.vm
        pairs = np.ascontiguousarray(features, np.float32).reshape(rows, 2 * self.info.mels)
        tokens = Tokens(0, ScheduledRequest((0,), 1), [array("i", range(-(-rows // PAGE)))], [0])
        step = self._step.fill([Span(tokens, 0, rows)])
        with device.errors(), interruptible(self._bundle.library.module, rows):
            sent, params = device.tensor(step), self._bundle.params
            vm["encode_sound"](device.tensor(pairs), sent, self._heard, self._encoder, params)
            vm["keep_sound"](self._heard, sent, self._sound, params)
            heard: Floats = tvm_runtime.array(device.read(self._heard))
        if not np.isfinite(heard).all():
            raise ComputeError("the model computed numbers that are not finite", next_step="compile the model again")
        return heard

    def begin(self, prompt: Sequence[int], rows: Sequence[int]) -> Floats:
        """Compute a prompt, as answer 0 -> logits f32[r, vocab] after its tokens of these indices, a view."""
        step = self._step.fill([Span(self._sequence(0), 0, len(prompt))])
        heard = sound_step(len(prompt), self.info.rows)
        return self._call("prefill", len(rows), np.array(prompt, np.int32), np.array(rows, np.int32), step, heard)

    def begin_others(self, prompt: Sequence[int], ready: int, answers: int) -> None:
        """Let `answers` answers begin with the prompt, of which the first `ready` ones have it already."""
        for answer in range(ready, answers):
            step = self._step.fill([Span(self._sequence(answer), 0, len(prompt))])
            heard, last = sound_step(len(prompt), self.info.rows), np.array([len(prompt) - 1], np.int32)
            self._call("prefill", 1, np.array(prompt, np.int32), last, step, heard)

    def decode(self, answers: Sequence[int], tokens: Sequence[int], position: int) -> Floats:
        """The next token of each of some answers, all at a position -> logits f32[b, vocab], a view."""
        step = self._step.fill([Span(self._sequence(one), position, 1) for one in answers])
        count = len(answers)
        if count not in self._decode_steps:
            self._decode_steps[count] = sound_step(count, self.info.rows)
        return self._call("decode", count, np.array(tokens, np.int32), step, self._decode_steps[count])

    def _go_on(self) -> None:
        if self.stopped():
            raise Stopped

    def _sequence(self, answer: int) -> Tokens:
        pages = array("i", range(answer * self._each, (answer + 1) * self._each))
        return Tokens(answer, ScheduledRequest((0,), 1), [pages], [0])

    def _call(self, name: str, count: int, *integers: NDArray[np.int32]) -> Floats:
        self._go_on()
        device, library = self._device, self._bundle.library
        with device.errors(), interruptible(library.module, len(integers[0])):
            out = tvm_runtime.view(self._logits, (count, self._vocab))
            sent: list[Any] = [device.tensor(values) for values in integers]
            library.vm[name](*sent, out, self._text, self._sound, self._bundle.params)
            logits: Floats = tvm_runtime.array(device.read(out))
        return logits
