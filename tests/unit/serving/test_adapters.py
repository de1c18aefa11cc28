"""Adapters in the tensors that kernels read: what is stored of them, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.bundle import AdaptedInfo, ModelInfo
from mlcpipe.bundle.row_runs import Run, order_of, runs_of
from mlcpipe.checkpoint.peft import LowRank
from mlcpipe.devices.cpu import choose
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.serving import adapters
from mlcpipe.runtime.serving.adapters import Adapter, AdapterStore, PackedAdapter
from tests.kernels.cases.adapters import plain
from tir_schedules.adapter_shape import AdapterShape

ROWS = ((1, 16, 2), (0, 16, 2), (47, 16, -1))  # of info's parts
SOURCES = ("l.q_proj.weight", "l.k_proj.weight")


def info(dtype: str, rows: tuple[Run, ...] = ()) -> AdaptedInfo:
    return AdaptedInfo(name="l.qk_proj.weight", inputs=32, columns=(32, 16), sources=SOURCES, dtype=dtype, rows=rows)


def packed(dtype: str, modules: dict[str, LowRank], blocks: int) -> tuple[Any, ...]:
    return adapters._packed(info(dtype), modules, blocks)


def pair(rank: int, columns: int, size: float = 1.0) -> LowRank:
    rng = np.random.default_rng(rank)
    a, b = (rng.standard_normal(shape).astype(np.float32) * size for shape in ((rank, 32), (columns, rank)))
    return LowRank(a, b, 1.5)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "rows"),
    [("float32", 1e-6, ()), ("float16", 2e-3, ()), ("uint8", 2e-2, ()), ("float32", 1e-6, ROWS), ("uint8", 2e-2, ROWS)],
)
def test_blocks_add_up_to_the_adapter(dtype: str, tolerance: float, rows: tuple[Run, ...]) -> None:
    """Of another rank in each part: scale * B A in the weight's order of rows, up to the rounding of the dtype."""
    modules, order = {"l.q_proj": pair(20, 32), "l.k_proj": pair(3, 16)}, order_of(rows, (32, 16))
    a, b, scale = adapters._packed(info(dtype, rows), modules, 2)
    rows_of, others = plain(AdapterShape(32, (32, 16), dtype), a, b)
    found = np.zeros((48, 32))
    for block in range(2):
        for part, of in enumerate((slice(0, 32), slice(32, 48))):
            found[of] += (others[block, of] * scale[block, part]) @ rows_of[block, part].T
    wanted = np.concatenate([one.scale * one.b @ one.a for one in modules.values()])[order]
    assert np.abs(found - wanted).max() < tolerance * np.abs(wanted).max()
    assert scale[1, 1, 0] == 0 and (scale[0, :, 0] != 0).all()


def test_runs_are_the_order_that_they_were_made_of() -> None:
    order = np.concatenate([np.random.default_rng(0).permutation(8), np.arange(8, 40), np.arange(79, 39, -3)])
    rest = np.setdiff1d(np.arange(80), order)
    order = np.concatenate([order, rest]).astype(np.int32)
    assert np.array_equal(order_of(runs_of(order), (80,)), order)
    assert runs_of(order_of(ROWS, (32, 16)).astype(np.int32)) == ROWS
    assert runs_of(order[:0]) == ()


@pytest.mark.parametrize("rows", [((0, 47, 1),), ((0, 32, 1), (33, 15, 1), (33, 1, 1)), ((16, 32, 1), (0, 16, 1))])
def test_rows_that_are_no_order_of_the_parts(rows: tuple[Run, ...]) -> None:
    with pytest.raises(ValueError, match="rows"):
        info("float32", rows)


def test_a_part_without_an_adapter_is_not_read() -> None:
    scale = packed("uint8", {"l.k_proj": pair(3, 16)}, 1)[2]
    assert scale[0, 0, 0] == 0 and scale[0, 1, 0] != 0


def test_numbers_that_float16_cannot_hold() -> None:
    with pytest.raises(OverflowError, match=r"l\.qk_proj"):
        packed("float16", {"l.q_proj": pair(4, 32, size=1e5)}, 1)


def model(adapted: tuple[AdaptedInfo, ...]) -> ModelInfo:
    return ModelInfo.model_construct(adapted=adapted)


def test_room_is_found_given_back_and_used_again() -> None:
    store = AdapterStore(model((info("float32"),)), choose(), 4)

    def load(name: str, blocks: int) -> Adapter:
        arrays = packed("float32", {"l.q_proj": pair(16 * blocks, 32)}, blocks)
        adapter = store.load(PackedAdapter(name, Path(name), blocks, arrays))
        for tensor, array in zip(store.tensors, arrays):
            np.testing.assert_array_equal(tvm_runtime.array(tensor)[adapter.begin : adapter.end], array)
        return adapter

    first, second = load("a", 1), load("b", 2)
    assert (first.begin, first.end, second.begin, second.end) == (0, 1, 1, 3)
    with pytest.raises(ResourceError, match="no room for the adapter c.*32 ranks.*found 16 of 64"):
        load("c", 2)
    store.release(second)
    store.release(second)  # nothing is given back twice
    third = load("c", 3)
    assert (third.begin, third.end) == (1, 4) and third.serial > second.serial
    store.release(second)
    with pytest.raises(ResourceError):
        load("d", 1)


def test_a_bundle_without_adapters_says_so() -> None:
    with pytest.raises(UsageError, match="compiled without adapters.*--adapters"):
        AdapterStore(model(()), choose(), 1)
