"""Short convolutions on the CPU: a prompt has the same bits however it is cut, and whatever else is in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.cases.short_conv import Part, numbers_of, step_of
from tests.kernels.harness import Array, compile_together, tensors
from tir_schedules.conv_shape import ConvShape
from tir_schedules.cpu.short_conv import short_conv

SHAPE, ROWS = ConvShape(64, 4, "float32"), 9


@pytest.fixture(scope="module")
def kernels() -> Any:
    return compile_together({"short_conv": short_conv(SHAPE)})


def outputs(kernels: Any, cuts: list[int]) -> tuple[Array, Array]:
    """y of a prompt in so many rows a step, the second sequence of each, and its slot after them."""
    other, (x, weight, state) = Part(2, write=4), numbers_of(SHAPE, [Part(ROWS)])
    found, begin, read = [], 0, -1
    for rows in cuts:
        inputs = np.concatenate([np.ones((2, SHAPE.channels), np.float32), x[begin : begin + rows]])
        step = step_of([other, Part(rows, read, 1)])
        arguments = tensors((inputs, weight, step, state, np.empty_like(inputs)))
        kernels["short_conv"](*arguments)
        state = arguments[3].numpy()
        found.append(arguments[4].numpy()[2:])
        begin, read = begin + rows, 1
    return np.concatenate(found), state[1]


CUTS = [[1] * ROWS, [3, 3, 3], [2, 1, 6], *([border, ROWS - border] for border in range(1, ROWS))]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_a_cut_prompt_has_the_same_bits(kernels: Any, cuts: list[int]) -> None:
    whole, kept = outputs(kernels, [ROWS])
    found, state = outputs(kernels, cuts)
    assert found.tobytes() == whole.tobytes() and state.tobytes() == kept.tobytes()
