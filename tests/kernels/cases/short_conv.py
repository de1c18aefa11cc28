"""Steps of short convolutions, and what numpy says of them: for kernels of CPUs and of GPUs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.kernels.harness import EPS, Array, Call, unwritten
from tir_schedules import step_layout as s
from tir_schedules.conv_shape import ConvShape

SLOTS = 6


class Part(NamedTuple):
    """Rows of a sequence in a step, and its slots. `drafts`: those for the states after its first rows."""

    rows: int
    read: int = -1
    write: int = -1
    drafts: tuple[int, ...] = ()


STEPS: dict[str, list[Part]] = {
    "mixed": [Part(4, 5, 5), Part(1, write=0), Part(2, 1, 2), Part(9), Part(3, 3, 3), Part(1, 4)],
    "first-row": [Part(1, write=2)],
    "in-place": [Part(1, 3, 3)],
    "nowhere": [Part(2, 1)],
    "drafts": [Part(3, 5, 5, (0, 1)), Part(1, 2, 2), Part(2, write=4), Part(6, 3, 3, (-1,))],
    "decode": [Part(1, 1, 1), Part(1, write=4), Part(1, 0, 5), Part(1, 3, 3)],
    "many-rows": [Part(37, 2, 4), Part(20, write=0)],
}


def step_of(parts: list[Part]) -> Array:
    """The integers of a step that these kernels read."""
    rows = [part.rows for part in parts]
    arrays = {
        s.POSITION: np.concatenate([np.arange(part.rows) + 5 * (part.read >= 0) for part in parts]),
        s.SLOT_WRITE: [part.write for part in parts],
        s.SEQUENCE: np.repeat(np.arange(len(parts)), rows),
        s.ROW_BEGIN: np.cumsum([0, *rows]),
        s.SLOT_READ: [part.read for part in parts],
    }
    if any(part.drafts for part in parts):
        slots = (part.drafts + (-1,) * (part.rows - len(part.drafts)) for part in parts)
        arrays[s.SLOT_OF_ROW] = np.concatenate(list(slots))
    numbers = [np.zeros(s.HEADER)]
    numbers[0][[s.SEQUENCES, s.ROWS]] = len(parts), sum(rows)
    for key, array in arrays.items():
        numbers[0][key] = sum(map(len, numbers)) + 1
        numbers += [np.array([10**9]), array]
    return np.concatenate(numbers).astype(np.int32)


class Expected(NamedTuple):
    """y in float64, the sum of the magnitudes that it is made of, and the state afterwards."""

    y: Array
    size: Array
    state: Array


def convolved(shape: ConvShape, parts: list[Part], x: Array, weight: Array, *others: Array) -> Expected:
    """What a step leaves."""
    *bias, state = others
    after, outputs, sizes, begin = state.copy(), [], [], 0
    slots = state.reshape(SLOTS, shape.kept, shape.channels)
    for part in parts:
        before = slots[part.read] if part.read >= 0 else np.zeros_like(slots[0])
        inputs = np.concatenate([before, x[begin : begin + part.rows]]).astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(inputs, shape.taps, axis=0)  # [rows, channels, taps]
        outputs.append((windows * weight).sum(axis=2))
        sizes.append(np.abs(windows * weight).sum(axis=2))
        if part.write >= 0:
            after[part.write] = inputs[part.rows :].ravel()
        for row, slot in enumerate(part.drafts, 1):
            if slot >= 0:
                after[slot] = inputs[row : row + shape.kept].ravel()
        begin += part.rows
    y, size = np.concatenate(outputs), np.concatenate(sizes)
    y, size = y + sum(bias), size + np.abs(sum(bias))
    return Expected(y / (1 + np.exp(-y)) if shape.activation else y, size, after)


def numbers_of(shape: ConvShape, parts: list[Part]) -> list[Array]:
    """x, weight, the bias if there is one, state."""
    rng = np.random.default_rng([shape.channels, shape.taps, len(parts)])
    sizes = [(sum(part.rows for part in parts), shape.channels), (shape.channels, shape.taps)]
    biases = [(shape.channels,)] if shape.bias else []
    sizes = [*sizes, *biases, (SLOTS, shape.kept * shape.channels)]
    x, *others = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    return [x.astype(shape.dtype), *others]


def conv_call(shape: ConvShape, parts: list[Part]) -> Call:
    """x, weight, the bias if there is one, step, state, y -> the state in place, and y."""
    *inputs, state = numbers_of(shape, parts)
    y, size, after = convolved(shape, parts, *inputs, state)
    bound = (shape.taps + 4 * shape.bias) * EPS * size + (2.0**-11 * np.abs(y) if shape.dtype == "float16" else 0)
    out, at = unwritten(inputs[0].shape, shape.dtype), len(inputs) + 1
    return Call((*inputs, step_of(parts), state, out), {at: (after, 0), at + 1: (y, bound)})
