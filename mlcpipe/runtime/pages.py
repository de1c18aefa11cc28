"""The pages of one sequence: keys and values of each layer are a plain tensor, and a step's integers another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.not_finite import compute_error, of_pages
from tir_schedules import step_layout as layout


class SequencePages:
    """A sequence whose i-th page is page i of every layer, and the compiled forwards over it."""

    def __init__(self, bundle: LoadedBundle) -> None:
        self._bundle, self._device, self._info = bundle, bundle.device, bundle.manifest.model
        info, vm = self._info, bundle.library.vm
        self._few, self._many = vm["forward_few"], vm["forward_many"]
        page_bytes = bundle.manifest.memory_plan.kv_bytes_per_token // info.num_layers * info.page_size
        count = -(-bundle.context_length // info.page_size)
        with self._device.errors():
            self._pages: Any = tvm_ffi.convert(
                [tvm_runtime.empty((count, page_bytes), "int8", self._device.handle) for _ in range(info.num_layers)]
            )
        self._one, self._chunk = _Step(bundle, count, 1), _Step(bundle, count, info.prefill_chunk)
        self._row = tvm_runtime.empty((1, info.vocab_size), "float32", self._device.handle)
        self._none = tvm_runtime.view(self._row, (0, info.vocab_size))

    def release(self) -> None:
        """Give the memory back."""
        self._pages = None

    def forward_step(self, token: int, length: int) -> Callable[[], Any]:
        """What computes the logits f32[1, V] of a token after `length` others; the launches are always the same."""
        tokens, step = self._one.fill(np.array([token], np.int32), length, length + 1)
        return partial(self._forward, self._few, (tokens,), step, self._row)

    def forward_prompt(self, ids: NDArray[np.int32], begin: int, length: int, rows: str) -> Callable[[], Any]:
        """What computes tokens of a prompt of `length` tokens, from the position `begin` on.

        `rows`: of which the logits f32[r, V] are wanted: none, last, all.
        """
        tokens, step = self._chunk.fill(ids, begin, length)
        logits, wanted = self._row, np.array([len(ids) - 1], np.int32)
        if rows == "none" and self._device.on_host:  # a GPU launches nothing of no rows
            logits, wanted = self._none, wanted[:0]
        elif rows == "all":
            wanted = np.arange(len(ids), dtype=np.int32)
            logits = tvm_runtime.empty((len(ids), self._info.vocab_size), "float32", self._device.handle)
        return partial(self._forward, self._many, (tokens, self._device.tensor(wanted)), step, logits)

    def compute_error(self, length: int) -> ComputeError:
        """The error for a sequence of `length` tokens in the pages whose logits are not finite."""
        tables = [range(-(-length // self._info.page_size))] * self._info.num_layers
        return compute_error(self._bundle, lambda: of_pages(self._bundle, self._pages, tables, length))

    def _forward(self, function: Any, tokens: tuple[Any, ...], step: Any, logits: Any) -> Any:
        function(*tokens, step, logits, self._pages, self._bundle.params)
        return logits


class _Step:
    """The integers of steps with at most `max_rows` rows of one sequence (`tir_schedules/step_layout.py`)."""

    def __init__(self, bundle: LoadedBundle, pages: int, max_rows: int) -> None:
        self._device = bundle.device
        fields = {
            layout.ROW_BEGIN: 2,
            layout.KEYS: 1,
            layout.TABLE_BEGIN: 2,
            layout.POSITION: max_rows,
            layout.SLOT: max_rows,
            layout.ROPE_LENGTH: max_rows,
            layout.SEQUENCE: max_rows,
            layout.TABLE: pages,
        }
        self._values = np.zeros(layout.HEADER + sum(fields.values()), np.int32)
        at = layout.HEADER
        self._of: dict[int, NDArray[np.int32]] = {}
        for field, size in fields.items():
            self._values[field] = at
            self._of[field] = self._values[at : at + size]
            at += size
        self._values[layout.WINDOW_TABLE] = self._values[layout.TABLE]
        self._values[layout.SEQUENCES] = 1
        self._of[layout.TABLE][:] = np.arange(pages)
        self._of[layout.TABLE_BEGIN][:] = 0, pages
        self._tokens_value = np.zeros(max_rows, np.int32)
        self._tensor, self._tokens = self._device.tensor(self._values), self._device.tensor(self._tokens_value)
        changing = int(self._values[layout.TABLE])  # the table, last, stays
        self._changing = self._values[:changing], tvm_runtime.view(self._tensor, (changing,))

    def fill(self, ids: NDArray[np.int32], begin: int, length: int) -> tuple[Any, Any]:
        """(tokens i32[n], step i32[k]) for tokens at the positions from `begin` on, of a sequence with `length`."""
        count, of = len(ids), self._of
        self._values[layout.ROWS] = of[layout.ROW_BEGIN][1] = count
        of[layout.KEYS][0] = begin + count
        of[layout.POSITION][:count] = of[layout.SLOT][:count] = np.arange(begin, begin + count)
        of[layout.ROPE_LENGTH][:count] = length
        self._tokens_value[:count] = ids
        values, tensor = self._changing
        self._device.put(tensor, values)
        self._device.put(self._tokens, self._tokens_value)
        return tvm_runtime.view(self._tokens, (count,)), self._tensor
