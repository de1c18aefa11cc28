"""LoRA adapters of requests, as kernels read them: blocks of ranks in tensors that all adapters share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle import AdaptedInfo, ModelInfo
from mlcpipe.bundle.row_runs import order_of
from mlcpipe.checkpoint.peft import LowRank, read_adapter
from mlcpipe.devices.base import Device
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import CheckpointError, ResourceError, UsageError
from mlcpipe.support.json_files import shown_path
from tir_schedules.step_layout import RANK

_LANES = 16  # columns that lie together in B
_SERIALS = itertools.count(1)


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter's arrays for `blocks` blocks: A, B and `scale` of each projection, as `tir_schedules/adapter_shape.py`
    says.
    """

    name: str
    path: Path
    blocks: int
    arrays: tuple[NDArray[Any], ...]


@dataclass(eq=False)
class Adapter:
    """A loaded adapter. `serial` is unique, also among adapters of the same name.

    `users` counts requests in progress, for the engine's thread alone; once `unloaded`, new requests cannot use it.
    """

    name: str
    path: Path
    begin: int
    end: int
    serial: int = field(default_factory=lambda: next(_SERIALS))
    users: int = 0
    unloaded: bool = False


def blocks_of(ranks: int) -> int:
    """Number of blocks for `ranks` ranks."""
    return -(-ranks // RANK)


def read_packed(folder: Path, name: str, model: ModelInfo) -> PackedAdapter:
    """A checked adapter of PEFT's. Raises CheckpointError, and UsageError for a bundle without adapters."""
    check_adaptable(model)
    shapes = {
        source.removesuffix(".weight"): (columns, one.inputs)
        for one in model.adapted
        for source, columns in zip(one.sources, one.columns)
    }
    found = read_adapter(folder, shapes, model.model_type)
    blocks = blocks_of(max(len(one.a) for one in found.modules.values()))
    try:
        arrays = [array for one in model.adapted for array in _packed(one, found.modules, blocks)]
    except OverflowError as error:
        raise CheckpointError("the adapter does not fit float16", where=shown_path(folder), found=error) from None
    return PackedAdapter(name, folder, blocks, tuple(arrays))


def scaled(packed: PackedAdapter, factor: float) -> PackedAdapter:
    """The adapter with another scale: `factor` times its own."""
    parts = enumerate(packed.arrays)  # A, B and `scale` of each projection
    arrays = tuple(array * np.float32(factor) if index % 3 == 2 else array for index, array in parts)
    return replace(packed, arrays=arrays)


def _arrays(info: AdaptedInfo, blocks: int) -> tuple[tuple[tuple[int, ...], str], ...]:
    """(shape, dtype) of A, B and `scale`, as `AdapterShape.arrays` describes them."""
    parts, four = len(info.columns), 4 if info.dtype == "uint8" else 1
    a = (blocks, parts, info.inputs // four, RANK * four)
    b = (blocks, sum(info.columns) // _LANES, RANK // four, _LANES * four)
    return (a, info.dtype), (b, info.dtype), ((blocks, parts, RANK), "float32")


def block_bytes(model: ModelInfo) -> int:
    """Bytes of a block of all projections."""
    arrays = [array for one in model.adapted for array in _arrays(one, 1)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)


def check_adaptable(model: ModelInfo) -> None:
    """Raises UsageError for a bundle that was compiled without adapters."""
    if not model.adapted:
        raise UsageError(
            "the bundle was compiled without adapters", next_step="compile it again with: mlcpipe compile --adapters"
        )


def _packed(info: AdaptedInfo, modules: Mapping[str, LowRank], blocks: int) -> tuple[NDArray[Any], ...]:
    """The arrays of a projection. Raises OverflowError for numbers that the dtype cannot hold."""
    parts = [modules.get(source.removesuffix(".weight")) for source in info.sources]
    a, b, scale = (np.zeros(shape, dtype) for shape, dtype in _arrays(info, blocks))
    begin, order = 0, order_of(info.rows, info.columns)
    for part, (columns, one) in enumerate(zip(info.columns, parts)):
        end = begin + columns // _LANES
        if one is not None:
            rank = len(one.a)
            rows, row_scales = _stored(_padded(one.a, blocks), info)
            in_order = one.b[order[_LANES * begin : _LANES * end] - _LANES * begin]
            others, other_scales = _stored(_padded(in_order.T, blocks), info)
            if info.dtype == "uint8":  # four k, or ranks, side by side; even k before odd ones in every eight
                rows = rows.reshape(blocks, RANK, -1, 4, 2).transpose(0, 2, 4, 1, 3)
                others = others.reshape(blocks, RANK // 4, 4, -1, _LANES).transpose(0, 3, 1, 4, 2)
            else:
                rows = rows.reshape(blocks, RANK, -1).transpose(0, 2, 1)
                others = others.reshape(blocks, RANK, -1, _LANES).transpose(0, 2, 1, 3)
            a[:, part], b[:, begin:end] = rows.reshape(a[:, part].shape), others.reshape(b[:, begin:end].shape)
            whole = np.float32(one.scale) * row_scales * other_scales
            scale[: blocks_of(rank), part] = whole.reshape(blocks, RANK)[: blocks_of(rank)]
        begin = end
    return a, b, scale


def _padded(rows: NDArray[np.float32], blocks: int) -> NDArray[np.float32]:
    """Rows padded with zeros to whole blocks."""
    return np.pad(rows, ((0, blocks * RANK - len(rows)), (0, 0)))


def _stored(rows: NDArray[np.float32], info: AdaptedInfo) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Each row in the dtype of the projection's adapters, and its scale."""
    largest = np.abs(rows).max(axis=1)
    if info.dtype == "uint8":
        scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
        return (np.rint(rows / scales[:, None]) + 128).astype(np.uint8), scales
    if largest.max() > np.finfo(info.dtype).max:
        raise OverflowError(f"{float(largest.max()):g} in {info.name}")
    return rows.astype(info.dtype), np.ones(len(rows), np.float32)


class AdapterStore:
    """The tensors that kernels read, with room for `blocks` blocks, and which of them are free."""

    def __init__(self, model: ModelInfo, device: Device, blocks: int) -> None:
        """Raises UsageError for a bundle without adapters."""
        check_adaptable(model)
        self._device, self._free = device, [True] * blocks
        arrays = [array for one in model.adapted for array in _arrays(one, blocks)]
        self._tensors = [tvm_runtime.empty(shape, dtype, device.handle) for shape, dtype in arrays]
        self.tensors: Any = tvm_ffi.convert(self._tensors)

    def load(self, packed: PackedAdapter) -> Adapter:
        """Copy an adapter to the device. Raises ResourceError if there is no room."""
        begin = next((i for i in range(len(self._free)) if all(self._run(i, packed.blocks))), None)
        if begin is None:
            raise ResourceError(
                f"no room for the adapter {packed.name}",
                expected=f"{packed.blocks * RANK} ranks that are free, next to each other",
                found=f"{sum(self._free) * RANK} of {len(self._free) * RANK}",
                next_step="unload another one, or start with more --adapter-ranks",
            )
        adapter = Adapter(packed.name, packed.path, begin, begin + packed.blocks)
        for tensor, values in zip(self._tensors, packed.arrays):
            at = begin * values[0].nbytes
            self._device.put(tvm_runtime.view(tensor, values.shape, at), values)
        self._free[begin : adapter.end] = [False] * packed.blocks
        return adapter

    def release(self, adapter: Adapter) -> None:
        """Free the room of an unused adapter."""
        self._free[adapter.begin : adapter.end] = [True] * (adapter.end - adapter.begin)
        adapter.end = adapter.begin  # so that a second call frees nothing

    def _run(self, begin: int, count: int) -> list[bool]:
        return self._free[begin : begin + count] if begin + count <= len(self._free) else [False]
