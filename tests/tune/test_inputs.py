"""What kernels are measured with: page tables, positions and ids that a model could have."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from mlcpipe.tuning.inputs import SAMPLING, Inputs, inputs_of
from mlcpipe.tuning.kernels import parameters
from tir_schedules.gpu.sampling import sampling_functions
from tir_schedules.op import op_of
from tir_schedules.paged import ATTENTION, PAGE

KEYS, ROWS = 203, 19


def cache_functions(folder: str, dtype: str) -> dict[str, Any]:
    attention = importlib.import_module(f"tir_schedules.{folder}.attention")
    functions = attention.kv_cache_functions(attention.AttentionShape(6, 2, 40, dtype, sliding_window=64), 1)
    return {op.kind: func for func in functions.values() if (op := op_of(func)) is not None and op.kind in ATTENTION}


def fits(given: Inputs, func: Any) -> None:
    """Every tensor has its dtype and its fixed dimensions; outputs are zeros, nothing else is."""
    for index, (value, (dims, dtype)) in enumerate(zip(given.values, parameters(func), strict=True)):
        if not dims:
            assert isinstance(value, (int, float))
            continue
        assert isinstance(value, np.ndarray) and str(value.dtype) == dtype and value.ndim == len(dims)
        assert all(size == int(dim) for size, dim in zip(value.shape, dims) if str(dim).isdigit())
        assert (index in given.outputs) <= (not value.any())


@pytest.mark.parametrize("folder, dtype", (("cpu", "float16"), ("cpu", "q8"), ("gpu", "float32")))
def test_attention_gets_one_sequence(folder: str, dtype: str) -> None:
    functions = cache_functions(folder, dtype)
    assert set(functions) == set(ATTENTION)
    for kind, func in functions.items():
        rows = 1 if "decode" in kind else ROWS
        given = inputs_of(func, rows, 0 if "chunk" in kind else KEYS)
        fits(given, func)
        small = [value for value in given.values if isinstance(value, np.ndarray) and value.dtype == np.int32]
        if "chunk" in kind:
            assert [list(value) for value in small] == [[0, rows], [0, rows], list(range(rows)), [0]] and not given.cold
            continue
        indptr, indices, length, begin, positions = small[-5:]
        assert list(indptr) == [0, 13] and sorted(indices) == list(range(13)) and given.cold
        assert length.flat[0] == KEYS - 12 * PAGE and list(begin) == [0]
        assert list(positions) == list(range(KEYS - 1, KEYS) if rows == 1 else range(KEYS, KEYS + rows))
        pages = next(value for value in given.values if isinstance(value, np.ndarray) and value.ndim == 5)
        stored = pages.view(np.float16 if folder == "cpu" else np.float32)  # what q8 has for scales
        assert np.isfinite(stored).all() and np.abs(stored).max() < 10


def test_sampling_gets_probabilities() -> None:
    functions = sampling_functions(1000)
    for kind in SAMPLING:
        given = inputs_of(functions[kind], 1)
        fits(given, functions[kind])
        if kind in ("argsort_probs", "sample_with_top_p"):
            assert np.asarray(given.values[0]).sum() == pytest.approx(1, abs=1e-5)
