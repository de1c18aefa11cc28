"""The rows that stand for pictures in prompts: a tower makes them a tile at a time, and the last ones are kept."""

from __future__ import annotations

import importlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.memory import PICTURE_ROWS_BYTES, tower_pages
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from mlcpipe.runtime.serving.step import PrefillRows
from mlcpipe.vision.processors.picture import Floats, Ints, Picture, picture_row
from tir_schedules.step_layout import KEYS, PAGE, SECOND


class PictureRows:
    """A bundle's tower, and its rows of the tiles that were needed last, by the hash of their picture.

    A tile is one call, so that its rows have the same bits whatever is computed beside it.
    """

    def __init__(self, bundle: LoadedBundle) -> None:
        info = bundle.manifest.model.vision
        assert info is not None
        self.info, self._device, self._bundle = info, bundle.device, bundle
        self._encode = bundle.library.vm["encode_picture"]
        processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
        self._patches, self._windows = processor.patches, getattr(processor, "windows", None)
        self._packed = processor.packed if info.packed else None
        self._kept: OrderedDict[tuple[int, int], Floats] = OrderedDict()
        self._room = PICTURE_ROWS_BYTES // (4 * info.width)  # rows
        self.encoded = self.queries = self.hits = 0  # tiles since the start: computed, asked for, and found computed
        self.rows, self.seconds = 0, 0.0  # that they have, and that they took
        self._step = StepBuffer()
        with self._device.errors():
            handle = self._device.handle
            self._pages = tvm_ffi.convert([tvm_runtime.empty((tower_pages(info), info.page_bytes), "int8", handle)])
            self._out = tvm_runtime.empty((info.most, info.width), "float32", handle)

    def encode(self, rows: Iterable[PrefillRows]) -> None:
        """Compute the tiles that a prefill needs and that are not kept."""
        for one in rows:
            for token in _tokens(one):
                if token < 0:
                    number, row = picture_row(token)
                    tile, at = one.sequence.request.pictures[number].tile_of(row)
                    if at == 0:  # where a step begins inside a tile, it was asked for before
                        self.queries += 1
                        self.hits += (number, tile) in self._kept
                    self._row(one.sequence, token)

    def inputs(self, rows: Iterable[PrefillRows]) -> tuple[Ints, Ints, Floats]:
        """For n tokens of a prefill: ids i32[n], which of the rows they are i32[n] (-1: none), the rows f32[e, width].

        There is at least one row: kernels take no empty tensors.
        """
        given = list(chain.from_iterable(_tokens(one) for one in rows))
        own = self.info.token if self.info.row_token is None else self.info.row_token
        ids = np.array([token if token >= 0 else own for token in given], np.int32)
        places, found = np.full(len(given), -1, np.int32), list[Floats]()
        for at, (sequence, token) in enumerate((one.sequence, t) for one in rows for t in _tokens(one)):
            if token < 0:
                places[at] = len(found)
                found.append(self._row(sequence, token))
        return ids, places, np.stack(found) if found else np.zeros((1, self.info.width), np.float32)

    def _row(self, sequence: Sequence, token: int) -> Floats:
        number, row = picture_row(token)
        picture = sequence.request.pictures[number]
        tile, at = picture.tile_of(row)
        if (rows := self._kept.get((number, tile))) is None:
            rows = self._kept[number, tile] = self._encoded(picture, tile)
            self._room -= len(rows)
            while self._room < 0 and len(self._kept) > 1:
                self._room += len(self._kept.popitem(last=False)[1])
        self._kept.move_to_end((number, tile))
        kept: Floats = rows[at]
        return kept

    def _encoded(self, picture: Picture, tile: int) -> Floats:
        began = time.monotonic()
        if self._packed is None:
            rows = self._called(picture.tiles[tile])
        else:
            rows = self._packed(picture, tile, self._called)
        self.encoded, self.rows = self.encoded + 1, self.rows + len(rows)
        self.seconds += time.monotonic() - began
        return rows

    def _called(self, tile: NDArray[np.uint8]) -> Floats:
        """The rows of a call. Raises ComputeError for numbers that are not finite."""
        patches, places = self._patches(tile, self.info)
        device, rows_of_it = self._device, len(patches)
        step = self._step_of([rows_of_it * self.info.merged])
        if self.info.class_token or self.info.packed:
            step[step[KEYS]] -= self.info.merged - self.info.class_token
        if self._windows is not None:
            step[SECOND] = len(step)
            step = np.concatenate([step, self._step_of(self._windows(tile, self.info))])
        with device.errors():
            inputs: list[NDArray[np.float32] | Ints] = [patches, places, step]
            out = tvm_runtime.view(self._out, (rows_of_it, self.info.width))
            self._encode(*map(device.tensor, inputs), out, self._pages, self._bundle.params)
            rows: Floats = tvm_runtime.array(device.read(out))[: rows_of_it - self.info.class_token].copy()
        if not np.isfinite(rows).all():
            raise ComputeError(
                "the tower computed numbers that are not finite", next_step="get the checkpoint again and compile it"
            )
        return rows

    def _step_of(self, counts: Iterable[int]) -> Ints:
        """A step of so many patches each, which attend to each other."""
        spans, page = list[Span](), 0
        for number, count in enumerate(counts):
            pages = range(page, page + -(-count // PAGE))
            one = Sequence(number, ScheduledRequest((0,) * count, 1), [array("i", pages)], [0])
            spans.append(Span(one, 0, count))
            page = pages.stop
        step: Ints = self._step.fill(spans).copy()
        return step


def _tokens(one: PrefillRows) -> list[int]:
    return one.sequence.tokens[one.begin : one.begin + one.rows]
