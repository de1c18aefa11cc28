"""Every dtype and operator, in kernels of one element an invocation: valid SPIR-V, numpy's numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.spirv import harness
from tests.spirv.cases import CASES, SIZE, Case

_BATCH = 24  # cases in one module: a host module for each would take most of the time


def _batches() -> list[list[Case]]:
    return [CASES[i : i + _BATCH] for i in range(0, len(CASES), _BATCH)]


def _module(cases: list[Case]) -> tvm.IRModule:
    functions = {}
    for i, case in enumerate(cases):
        func = harness.elementwise(case.inputs, case.function, SIZE)
        functions[f"case{i}"] = func.with_attr("global_symbol", f"case{i}")
    return tvm.IRModule(functions)


@harness.needs_tools
@pytest.mark.parametrize("cases", _batches(), ids=lambda cases: cases[0].name)
def test_modules_are_valid(cases: list[Case], tmp_path: Path) -> None:
    found = harness.kernels(_module(cases))
    assert len(found) == len(cases)
    harness.check(found, tmp_path)


@pytest.mark.parametrize("cases", _batches(), ids=lambda cases: cases[0].name)
def test_numbers_are_those_of_numpy(cases: list[Case], device: None) -> None:
    harness.build.register()
    compiled = tvm.compile(_module(cases), target=harness.TARGET)
    target = tvm.device("vulkan", 0)
    for i, case in enumerate(cases):
        arrays = case.arrays()
        with np.errstate(all="ignore"):
            expected = case.reference(*arrays)
        dtype = "float32" if case.tolerance or expected.dtype == np.float64 and case.inputs[0] == "float32" else None
        output = tvm.runtime.tensor(np.zeros(SIZE, dtype or expected.dtype), target)
        compiled[f"case{i}"](*(tvm.runtime.tensor(a, target) for a in arrays), output)
        found = output.numpy()
        if case.tolerance:
            error = np.abs(found - expected) / np.maximum(1, np.abs(expected))
            assert error.max() <= case.tolerance, (case.name, float(error.max()), arrays[0][error.argmax()])
        else:
            np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=case.name)
