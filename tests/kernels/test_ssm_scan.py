"""Scans of Mamba-2 on the CPU: a prompt has the same bits however it is cut, and whatever else is in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.cases.short_conv import Part, step_of
from tests.kernels.cases.ssm_scan import numbers_of
from tests.kernels.harness import Array, compile_together, tensors
from tir_schedules.cpu.ssm_scan import ssm_scan
from tir_schedules.ssm_shape import SsmShape

SHAPE, ROWS = SsmShape(4, 32, 16, 2, 200, "float32"), 11


@pytest.fixture(scope="module")
def kernels() -> Any:
    return compile_together({"ssm_scan": ssm_scan(SHAPE)})


def outputs(kernels: Any, cuts: list[int]) -> tuple[Array, Array]:
    """y of a prompt in so many rows a step, the second sequence of each, and its slot after them."""
    xbc, projected, *weights, state = numbers_of(SHAPE, [Part(ROWS)])
    found, begin, read = [], 0, -1
    for rows in cuts:
        inputs = [
            np.concatenate([np.ones((2, one.shape[1]), np.float32), one[begin : begin + rows]])
            for one in (xbc, projected)
        ]
        y = np.empty((rows + 2, SHAPE.inner), np.float32)
        arguments = tensors((*inputs, *weights, step_of([Part(2, write=4), Part(rows, read, 1)]), state, y))
        kernels["ssm_scan"](*arguments)
        state = arguments[6].numpy()
        found.append(arguments[7].numpy()[2:])
        begin, read = begin + rows, 1
    return np.concatenate(found), state[1]


CUTS = [[1] * ROWS, [3, 3, 3, 2], [2, 1, 8], *([border, ROWS - border] for border in range(1, ROWS))]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_cut_prompt_has_the_same_bits(kernels: Any, cuts: list[int]) -> None:
    whole, kept = outputs(kernels, [ROWS])
    found, state = outputs(kernels, cuts)
    assert found.tobytes() == whole.tobytes() and state.tobytes() == kept.tobytes()
