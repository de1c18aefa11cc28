"""What kernels are measured with: page tables, positions and ids that a model could have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcpipe.nn.definitions import matmul
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.native_formats import native_scheme, scale_values
from mlcpipe.tuned.kernels import parameters
from mlcpipe.tuning.inputs import SAMPLING, Inputs, inputs_of
from tir_schedules import step_layout as step
from tir_schedules.cpu import attention as cpu
from tir_schedules.gpu import attention as gpu
from tir_schedules.gpu.sampling.mlc_contract import sampling_functions
from tir_schedules.op import op_of
from tir_schedules.paged import ATTENTION, PAGE

KEYS, ROWS = 203, 19


def fits(given: Inputs, func: Any) -> None:
    """Every tensor has its dtype and its fixed dimensions; outputs are zeros, nothing else is."""
    for index, (value, (dims, dtype)) in enumerate(zip(given.values, parameters(func), strict=True)):
        if not dims:
            assert isinstance(value, (int, float))
            continue
        assert isinstance(value, np.ndarray) and str(value.dtype) == dtype and value.ndim == len(dims)
        assert all(size == int(dim) for size, dim in zip(value.shape, dims) if str(dim).isdigit())
        assert (index in given.outputs) <= (not value.any())


def test_attention_gets_one_sequence() -> None:
    made = gpu.kv_cache_functions(gpu.AttentionShape(6, 2, 40, "float32", sliding_window=64), 1)
    functions = {op.kind: func for func in made.values() if (op := op_of(func)) is not None}
    for kind in ATTENTION:
        func = functions[kind]
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
        assert np.isfinite(pages).all() and np.abs(pages).max() < 10


@pytest.mark.parametrize(("kind", "rows", "first"), [("attend_few", 1, KEYS - 1), ("attend_many", ROWS, KEYS)])
@pytest.mark.parametrize(("kernels", "dtype"), [(cpu, "float16"), (cpu, "q8"), (gpu, "float16")])
def test_attention_over_pages_gets_one_sequence(kind: str, rows: int, first: int, kernels: Any, dtype: str) -> None:
    func = kernels.page_functions(kernels.AttentionShape(6, 2, 40, dtype), 0.1, 64)[kind]
    given = inputs_of(func, rows, KEYS)
    fits(given, func)
    integers, pages = given.values[1:3]
    assert isinstance(integers, np.ndarray) and isinstance(pages, np.ndarray) and given.cold
    positions = integers[integers[step.POSITION] :][:rows]
    assert list(positions) == list(range(first, first + rows)) and list(integers[:2]) == [1, rows]
    count = -(-(first + rows) // PAGE)
    for table in (step.TABLES, step.TABLES + 1):
        assert sorted(integers[integers[table] :][:count]) == list(range(count)) and len(pages) == count
    stored = pages.view(np.float16)  # what q8 has for scales
    assert np.isfinite(stored).all() and np.abs(stored).max() < 10


def test_sampling_gets_probabilities() -> None:
    functions = sampling_functions(1000)
    for kind in SAMPLING:
        given = inputs_of(functions[kind], 1)
        fits(given, functions[kind])
        if kind in ("argsort_probs", "sample_with_top_p"):
            assert np.asarray(given.values[0]).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "Q4_K", "affine4_g64_bf16"])
def test_scales_of_block_formats_are_numbers(name: str) -> None:
    scheme = native_scheme(name)
    func = matmul(scheme, load_layout("rows16"), 32, 256, "float32")
    arrays = inputs_of(func, 1).values
    names = list(scheme.shapes(32, 256))
    rows = load_layout("rows16").unrepack(scheme, dict(zip(names, arrays[1:])), 32, 256)
    assert np.isfinite(scale_values(scheme, rows["q_scale"])).all()


@pytest.mark.parametrize("kernels", [cpu, gpu])
def test_some_rows_of_a_step_get_their_numbers(kernels: Any) -> None:
    shape = kernels.AttentionShape(6, 2, 40, "float16", queries_only=True, picked_rows=True)
    func = kernels.page_functions(shape, 0.1, 64)["attend_few"]
    given = inputs_of(func, 3, KEYS)
    fits(given, func)
    assert list(given.values[3]) == [0, 1, 2] and given.values[0].shape == (3, 6, 40)
