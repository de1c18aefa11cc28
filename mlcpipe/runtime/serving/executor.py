"""Computes steps: weights, states and logits on the device. The scheduler decides what to compute."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Hashable, Iterable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.states import first_page, group_of, windows_of
from mlcpipe.devices.base import Reused
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import step_threads
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.remote.stages import RemoteStore
from mlcpipe.runtime.serving.adapters import AdapterStore
from mlcpipe.runtime.serving.batch import StepBuffer, decode_spans, prefill_spans
from mlcpipe.runtime.serving.page_pool import PageCopy
from mlcpipe.runtime.serving.picture_rows import PictureRows
from mlcpipe.runtime.serving.sequence import Sequence
from mlcpipe.runtime.serving.stages import Earlier, EarlierStages, Experts, Kind, experts_argument
from mlcpipe.runtime.serving.state_store import StateStore, UnitBytes
from mlcpipe.runtime.serving.step import DecodeRows, PrefillRows
from mlcpipe.runtime.serving.token_tables import TokenTables
from tir_schedules.step_layout import PAGE


class Forward(NamedTuple):
    """A forward whose integers are on the device: `launch` returns its logits f32[r, V].

    Forwards with equal keys launch the same kernels; None marks one that differs from every other.
    """

    launch: Callable[[], Any]
    key: Hashable


class HiddenRows(NamedTuple):
    """Hidden states of a sequence that the last forward of their kind kept for a draft head.

    They are `size` rows from `row` on, for the tokens from `position` on.
    """

    row: int
    position: int
    size: int


class Executor:
    """All states, and the compiled forwards over them. Its caller enters the device's `errors`."""

    def __init__(
        self, bundle: LoadedBundle, units: Units, decode_rows: int, adapter_blocks: int = 0, first_rows: int = 0
    ) -> None:
        """Allocates `units` of each state, and logits of `decode_rows` rows, the most of a forward.

        With `first_rows` it allocates those, and the others when they are needed.
        `adapter_blocks`: the room for adapters. Raises UsageError if the bundle has no forwards with them.
        """
        self.bundle, self._device = bundle, bundle.device
        self._vocab, vm = bundle.manifest.model.vocab_size, bundle.library.vm
        self._prefill = vm["prefill"]
        self._decode = vm["decode"] if bundle.manifest.model.diffusion is None else None
        self._table = bundle.manifest.states
        self.adapters: AdapterStore | None = None
        with self._device.errors():
            if adapter_blocks:
                self.adapters = AdapterStore(bundle.manifest.model, bundle.device, adapter_blocks)
                self._decode_adapted, self._prefill_adapted = vm["decode_adapted"], vm["prefill_adapted"]
            self._stores: list[StateStore | RemoteStore] = []
            here = bundle.in_order if bundle.elsewhere is None else bundle.in_order[-1:]
            if bundle.elsewhere is not None:
                tables = [part.manifest.states for part in bundle.stages[:-1]]
                self._stores += bundle.elsewhere.allocate(units, tables)
            for part in here:
                with part.device.errors():
                    self._stores.append(StateStore(part, self._table, units))
            self._places = [(store, index) for store in self._stores for index in range(len(store.table))]
            self.states: Any = self._stores[-1].tensors  # of the last stage, where there are several
            self.earlier: Earlier | None = bundle.elsewhere
            self.experts = None if bundle.experts is None else Experts(bundle.experts)
            if bundle.stages and self.earlier is None:
                own = [store for store in self._stores[:-1] if isinstance(store, StateStore)]
                self.earlier = EarlierStages(bundle.stages[:-1], own, bundle.device, self.experts)
            # The logits of a forward of each kind, which one step computes in turn.
            self._logits, self._most_rows = [self._empty(first_rows or decode_rows) for _ in range(2)], decode_rows
            self._logits.append(self._logits[1])  # until one of its kind needs more
            self._decode_logits: dict[int, Any] = {}  # views of the first, by rows
            self._tables = TokenTables(bundle)
            self._begin = step_threads(bundle.library.module if self._device.on_host else None)
            self._decode_ids, self._decode_step = Reused(self._device, "int32"), Reused(self._device, "int32")
        self.pictures: PictureRows | None = None
        if bundle.manifest.model.vision is not None:
            self.pictures, self._prefill_pictures = PictureRows(bundle), vm["prefill_pictures"]
        self._step = StepBuffer()
        self.hidden: Any = None
        self.hidden_of_prompts: Any = None
        self.hidden_rows: dict[Sequence, HiddenRows] = {}
        self.prompt_hidden_rows: dict[Sequence, HiddenRows] = {}

    def keep_hidden(self, width: int, *, prompts: bool = False) -> None:
        """From now on decode forwards keep the states of a draft head in `hidden` f32[rows, width], see `hidden_rows`.

        With `prompts` prefill forwards do so too, in `hidden_of_prompts`, see `prompt_hidden_rows`.
        """
        vm, handle = self.bundle.library.vm, self._device.handle
        with self._device.errors():
            self._decode_hidden = vm["decode_hidden"]
            self.hidden = tvm_runtime.empty((self.bundle.manifest.model.max_batch, width), "float32", handle)
            if prompts:
                self._prefill_hidden = vm["prefill_hidden"]
                chunk = self.bundle.manifest.model.prefill_chunk
                self.hidden_of_prompts = tvm_runtime.empty((chunk, width), "float32", handle)

    def copy_pages(self, copies: abc.Sequence[PageCopy]) -> None:
        """Copy pages, before the forwards of a step."""
        if copies:  # a group without copies copies a page to itself: a GPU takes no tensor without elements
            groups = range(len(windows_of(self._table)))
            pairs = ([copy[:2] for copy in copies if copy.group == group] or [(0, 0)] for group in groups)
            arrays = [np.array(several, np.int32).reshape(-1, 2) for several in pairs]
            for store in self._stores:
                store.copy_pages(arrays)

    def ids(self, index: int, sequence: Sequence) -> list[int]:
        """The units of a state that a sequence continues from: its pages that later queries attend to, or its slot."""
        state = self._table[index]
        if state.kind == "slot":
            return [sequence.slot] if sequence.slot >= 0 else []
        group = group_of(self._table, state)
        first, end = first_page(state.window, sequence.computed), -(-sequence.computed // PAGE)
        return list(sequence.tables[group][first:end])

    def read_units(self, index: int, ids: abc.Sequence[int]) -> UnitBytes:
        """A copy int8[n, unit_bytes] of units of a state, in the order of `ids`, which differ."""
        store, own = self._places[index]
        return store.read_units(own, ids)

    def write_units(self, index: int, ids: abc.Sequence[int], units: UnitBytes) -> None:
        """Write units as `read_units` returns them."""
        store, own = self._places[index]
        store.write_units(own, ids, units)

    def copy_out(self, ids: abc.Sequence[int]) -> UnitBytes:
        """A copy int8[n, bytes] of these pages of all states, which are of one group; `ids` differ."""
        with self._device.errors():
            return np.concatenate([self.read_units(index, ids) for index in range(len(self._table))], axis=1)

    def copy_in(self, ids: abc.Sequence[int], pages: UnitBytes) -> None:
        """Write pages as `copy_out` returns them."""
        begin = 0
        with self._device.errors():
            for index, state in enumerate(self._table):
                self.write_units(index, ids, pages[:, begin : begin + state.unit_bytes])
                begin += state.unit_bytes

    def decode(self, rows: abc.Sequence[DecodeRows]) -> Forward:
        """The forward of decode rows; logits of all rows."""
        tokens = np.array([token for one in rows for token in one.tokens], np.int32)
        integers = self._step.fill(decode_spans(rows))
        if (earlier := self.earlier) is not None:
            launches = earlier.prepare("decode", tokens, integers)
            launch = self._last("decode", (), tokens, integers)
            logits = self._logits_of(0, len(tokens))
            return Forward(lambda: launch(earlier.run(launches), logits, len(tokens)), None)
        ids, step = self._decode_ids.put(tokens), self._decode_step.put(integers)
        if (logits := self._decode_logits.get(len(tokens))) is None:
            logits = self._decode_logits[len(tokens)] = self._logits_of(0, len(tokens))
        self.hidden_rows = {}
        params, gathered = self._tables.decode(tokens)
        key = ids, step, *gathered
        if any(one.sequence.request.adapter for one in rows):
            launch = partial(self._adapted, len(tokens), self._decode_adapted, (ids,), step, logits, params)
            return Forward(launch, (*key, "adapted"))
        if self.hidden is not None:
            self.hidden_rows = _rows_of((one.sequence, one.sequence.computed, len(one.tokens)) for one in rows)
            inputs = ids, tvm_runtime.view(self.hidden, (len(tokens), self.hidden.shape[1]))
            launch = partial(self._forward, len(tokens), self._decode_hidden, inputs, step, logits, params)
            return Forward(launch, (*key, "hidden"))
        return Forward(partial(self._forward, len(tokens), self._decode, (ids,), step, logits, params), key)

    def prefill(self, rows: abc.Sequence[PrefillRows], *, all_rows: bool = False) -> Forward:
        """The forward of prefill rows; logits of those `wanted` of each, or of all rows.

        Those of all rows of scored sequences follow.
        """
        scores = any(one.sequence.request.scored for one in rows)
        earlier = self.earlier
        if earlier is not None and not all_rows and not scores:
            pieces = earlier.pieces(rows)
            if len(pieces) > 1:
                return self._overlapped(earlier, pieces)
        seen: tuple[Any, ...] = ()
        if self.pictures is not None and any(one.sequence.request.pictures for one in rows):
            tokens, *seen_rows = self.pictures.inputs(rows)
            seen = tuple(map(self._device.tensor, seen_rows))
        else:
            tokens = _tokens(rows)
        ends, wanted = np.cumsum([one.rows for one in rows]), _wanted(rows)
        scored = [np.arange(end - one.rows, end) for end, one in zip(ends, rows) if one.sequence.request.scored]
        wanted = np.concatenate([wanted, *scored]).astype(np.int32)
        if all_rows:
            wanted = np.arange(len(tokens), dtype=np.int32)
        elif (
            not wanted.size
        ):  # kernels need a row: a GPU's cannot launch without, a CPU's would read the row before the first
            wanted = np.zeros(1, np.int32)
        ahead = bool(seen) and self.pictures is not None and self.pictures.info.ahead != ""
        integers = self._step.fill(prefill_spans(rows), ahead=ahead)
        if earlier is not None:
            launches = earlier.prepare("prefill", tokens, integers)
            launch = self._last("prefill", (self._device.tensor(wanted),), tokens, integers)
            logits = self._empty(len(wanted)) if all_rows else self._logits_of(2 if scored else 1, len(wanted))
            return Forward(lambda: launch(earlier.run(launches), logits, -1), None)
        ids: tuple[Any, ...] = self._device.tensor(tokens), self._device.tensor(wanted)
        step, params = self._device.tensor(integers), self._tables.prompts(tokens)
        logits = self._empty(len(wanted)) if all_rows else self._logits_of(2 if scored else 1, len(wanted))
        self.prompt_hidden_rows = {}
        if any(one.sequence.request.adapter for one in rows):
            launch = partial(self._adapted, -1, self._prefill_adapted, ids, step, logits, params)
            return Forward(launch, None)
        function = self._prefill
        if seen:
            ids, function = (ids[0], *seen, ids[1]), self._prefill_pictures
        elif self.hidden_of_prompts is not None and not all_rows:  # pictures have no rows for a draft head
            self.prompt_hidden_rows = _rows_of((one.sequence, one.begin, one.rows) for one in rows)
            width = self.hidden_of_prompts.shape[1]
            function, ids = self._prefill_hidden, (*ids, tvm_runtime.view(self.hidden_of_prompts, (len(tokens), width)))
        return Forward(partial(self._forward, -1, function, ids, step, logits, params), None)

    def _last(
        self, kind: Kind, inputs: tuple[Any, ...], tokens: NDArray[np.int32], integers: NDArray[np.int32]
    ) -> Callable[[Any, Any, int], Any]:
        """The launch of the last stage: (the rows of the one before, logits f32[r, V] to write, rows) -> logits."""
        step, function = self._device.tensor(integers), self._decode if kind == "decode" else self._prefill
        first = len(self.bundle.stages) == 1
        own, params = None, self._tables.whole
        if first:
            own, params = self._device.tensor(tokens), self._tables.prompts(tokens)
        calls = experts_argument(self.bundle.stages[-1], self.experts)

        def launch(hidden: Any, logits: Any, rows: int) -> Any:
            return self._forward(rows, function, (own if first else hidden, *inputs), step, logits, *calls, params)

        return launch

    def _overlapped(self, earlier: Earlier, pieces: abc.Sequence[abc.Sequence[PrefillRows]]) -> Forward:
        """The forward of prefill rows in pieces, of which each stage computes one while others compute theirs."""
        launches, last, begins, total = [], [], [], 0
        for rows in pieces:
            tokens, wanted = _tokens(rows), _wanted(rows)
            integers = self._step.fill(prefill_spans(rows))
            launches.append(earlier.prepare("prefill", tokens, integers, alone=False))
            needed = wanted if wanted.size else np.zeros(1, np.int32)
            last.append((self._last("prefill", (self._device.tensor(needed),), tokens, integers), len(wanted)))
            begins.append(total)
            total += len(wanted)
        logits = self._logits_of(1, max(1, total))

        def launch() -> Any:
            with closing(earlier.run_ahead(launches)) as arrived:
                for hidden, (run, count), begin in zip(arrived, last, begins):
                    if count == total:  # kernels write to the beginning of a tensor alone
                        run(hidden, logits, -1)
                        continue
                    made = run(hidden, self._empty(max(1, count)), -1)
                    if count:
                        place = tvm_runtime.view(logits, (count, self._vocab), 4 * begin * self._vocab)
                        tvm_runtime.copy(made, place)
            return logits

        return Forward(launch, None)

    def _logits_of(self, kind: int, rows: int) -> Any:
        """Logits f32[rows, V] of a forward: 0 decode, 1 prefill, 2 prefill with scored rows."""
        if rows > self._logits[kind].shape[0]:
            self._logits[kind] = self._empty(max(self._most_rows, rows))
        return tvm_runtime.view(self._logits[kind], (rows, self._vocab))

    def _empty(self, rows: int) -> Any:
        return tvm_runtime.empty((rows, self._vocab), "float32", self._device.handle)

    def _forward(self, rows: int, function: Any, ids: tuple[Any, ...], step: Any, logits: Any, *weights: Any) -> Any:
        """Launch a forward; `rows` of a decode step, -1 of prompts."""
        self._begin(rows)
        function(*ids, step, logits, self.states, *weights)
        self._begin(0)
        return logits

    def _adapted(self, rows: int, function: Any, ids: tuple[Any, ...], step: Any, logits: Any, params: Any) -> Any:
        assert self.adapters is not None
        return self._forward(rows, function, ids, step, logits, self.adapters.tensors, params)


def _tokens(rows: abc.Sequence[PrefillRows]) -> NDArray[np.int32]:
    return np.concatenate([np.array(one.tokens, np.int32) for one in rows])


def _wanted(rows: abc.Sequence[PrefillRows]) -> NDArray[np.int32]:
    """The rows of a forward that give logits."""
    ends = np.cumsum([one.rows for one in rows])
    return np.array([end - one.rows + row for end, one in zip(ends, rows) for row in one.wanted], np.int32)


def _rows_of(rows: Iterable[tuple[Sequence, int, int]]) -> dict[Sequence, HiddenRows]:
    """Consecutive rows of (sequence, position of its first row, number of rows)."""
    found, row = {}, 0
    for sequence, position, size in rows:
        found[sequence] = HiddenRows(row, position, size)
        row += size
    return found
