"""Steps of rows with adapters, and what numpy says of y += B A x: for kernels of CPUs and of GPUs."""

from __future__ import annotations

import numpy as np

from tests.kernels.harness import EPS, Array, Call
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.step_layout import ADAPTER_BEGIN, ADAPTER_END, HEADER, RANK

BLOCKS = 9
# Begin and end of the blocks of each row, by name.
ROWS: dict[str, list[tuple[int, int]]] = {
    "one": [(8, 9)],
    "none": [(0, 0)] * 3,
    "alike": [(3, 5)] * 9,
    "mixed": [(0, 1), (0, 0), (8, 9), (2, 5), (2, 5), (2, 5), (2, 5), (2, 5), (5, 6), (5, 6), (4, 6), (0, 0), (7, 9)],
    "ends-alike": [(1, 3), (2, 3), (1, 3), (2, 3)],
    "blocks-of-one-row-in-four": [(1, 4), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2), (1, 2)],
}


def adapter_call(shape: AdapterShape, rows: list[tuple[int, int]]) -> Call:
    """x, step, a, b, scale, y -> y in place."""
    rng = np.random.default_rng([shape.k, len(rows)])
    arrays = stored_arrays(shape, rng)
    x, y = (rng.standard_normal((len(rows), columns)).astype(np.float32) for columns in (shape.k, shape.columns))
    delta, size = low_rank(shape, rows, x, arrays)
    bound = (shape.k + 64) * EPS * (size + np.abs(y))
    return Call((x, step_of(rows), *arrays, y), {5: (y.astype(np.float64) + delta, bound)})


def stored_arrays(shape: AdapterShape, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """a, b, scale; every second part of block 4 is unused, and holds NaN or large numbers."""
    codes = shape.dtype == "uint8"
    a, b, scale = (
        rng.integers(1, 256, size).astype(of) if of == "uint8" else rng.standard_normal(size).astype(of)
        for size, of in shape.arrays(BLOCKS).values()
    )  # fmt: skip
    scale[:, :, 0] += 5  # not 0
    scale[4, ::2] = 0
    a[4, ::2] = 255 if codes else np.nan
    return a, b, scale * np.float32(1e-3 if codes else 1)


def step_of(rows: list[tuple[int, int]]) -> Array:
    """The integers of a step that kernels of adapters read."""
    step = np.full(HEADER + 2 * len(rows) + 5, -1, np.int32)
    for field, at, column in ((ADAPTER_BEGIN, HEADER + 3, 0), (ADAPTER_END, HEADER + 4 + len(rows), 1)):
        step[field] = at
        step[at : at + len(rows)] = [row[column] for row in rows]
    return step


def plain(shape: AdapterShape, a: Array, b: Array) -> tuple[Array, Array]:
    """float64 of A [block, part, k, rank] and B [block, column, rank]."""
    blocks, parts = a.shape[:2]
    if shape.dtype == "uint8":
        a = (a.astype(np.float64) - 128).reshape(blocks, parts, -1, 2, RANK, 4).transpose(0, 1, 2, 5, 3, 4)
        b = (b.astype(np.float64) - 128).reshape(blocks, -1, RANK // 4, 16, 4).transpose(0, 1, 2, 4, 3)
    b = b.astype(np.float64).reshape(blocks, -1, RANK, 16).transpose(0, 1, 3, 2)
    return a.astype(np.float64).reshape(blocks, parts, -1, RANK), b.reshape(blocks, -1, RANK)


def low_rank(
    shape: AdapterShape, rows: list[tuple[int, int]], x: Array, arrays: tuple[Array, Array, Array], steps: int = 0
) -> tuple[Array, Array]:
    """B A x, and the sum of the magnitudes of what is added up, in float64.

    With `steps` A x is rounded to so many of them up to the largest of 16 ranks. Where its error may decide which one,
    a step is added to the sum, divided by EPS.
    """
    (a, b), scale, x = plain(shape, *arrays[:2]), arrays[2].astype(np.float64), x.astype(np.float64)
    y, size, ends = np.zeros((len(x), shape.columns)), np.zeros((len(x), shape.columns)), np.cumsum((0, *shape.parts))
    for row, (begin, end) in enumerate(rows):
        for block in range(begin, end):
            for part in np.flatnonzero(scale[block, :, 0]):
                columns = slice(ends[part], ends[part + 1])
                t = x[row] @ a[block, part] * scale[block, part]
                reach = np.abs(x[row]) @ np.abs(a[block, part]) * np.abs(scale[block, part])
                if steps:
                    step = np.abs(t).max() / steps
                    unsure = np.abs(t / step % 1 - 0.5) * step < (shape.k + 64) * EPS * reach
                    t, reach = np.rint(t / step) * step, reach + unsure * step / EPS
                y[row, columns] += b[block, columns] @ t
                size[row, columns] += np.abs(b[block, columns]) @ reach
    return y, size
