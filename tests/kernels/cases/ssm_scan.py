"""Scans of Mamba, and what numpy says of them: for kernels of CPUs and of GPUs."""

from __future__ import annotations

import numpy as np

from tests.kernels.cases.short_conv import SLOTS, Part, step_of
from tests.kernels.harness import Array, Call, unwritten
from tir_schedules.ssm_shape import SsmShape

BOUND = 2.0**-17  # of the magnitudes that a number is made of: dt, its exponential and a hundred sums


def scanned(shape: SsmShape, parts: list[Part], numbers: list[Array]) -> tuple[list[Array], list[Array]]:
    """y and the state afterwards, in float64; and the same of all magnitudes."""
    if shape.steady:
        xbc, a_log, state = (one.astype(np.float64) for one in numbers)
        dt, skip = np.ones((len(xbc), shape.heads)), np.zeros(shape.heads)
    else:
        xbc, projected, a_log, dt_bias, skip, state = (one.astype(np.float64) for one in numbers)
        dt = np.logaddexp(0, projected[:, -shape.heads :] + dt_bias)
    decay = np.exp(-np.exp(a_log) * dt.reshape(*dt.shape, *(1,) * (a_log.ndim - 1)))
    decay = decay.reshape(len(dt), shape.heads, 1, -1)
    found = [_scanned(shape, parts, f(xbc), dt, decay, f(skip), f(state)) for f in (np.asarray, np.abs)]
    return found[0], found[1]


def _scanned(
    shape: SsmShape, parts: list[Part], xbc: Array, dt: Array, decay: Array, skip: Array, state: Array
) -> list[Array]:
    sizes = (shape.heads, shape.head_dim, shape.state_size)
    blocks = (shape.blocks, shape.state_size, shape.lanes)
    x, b, c = np.split(xbc, [shape.inner, shape.inner + shape.groups * shape.state_size], axis=1)
    x = x.reshape(-1, shape.heads, shape.head_dim)
    b, c = (np.repeat(one.reshape(len(x), shape.groups, -1), shape.heads // shape.groups, axis=1) for one in (b, c))
    after, y, row = state.copy(), np.empty_like(x), 0
    for part in parts:
        own = np.zeros(sizes)
        if part.read >= 0:
            own = state[part.read].reshape(blocks).swapaxes(1, 2).reshape(sizes)
        slots = dict(zip(range(row, row + part.rows), (*part.drafts, -1)))
        slots[row + part.rows - 1] = part.write
        for i in range(row, row + part.rows):
            own = own * decay[i] + (dt[i][:, None] * x[i])[:, :, None] * b[i][:, None]
            y[i] = (own * c[i][:, None]).sum(axis=2) + skip[:, None] * x[i]
            if (slot := slots.get(i, -1)) >= 0:
                after[slot] = own.reshape(shape.blocks, shape.lanes, shape.state_size).swapaxes(1, 2).ravel()
        row += part.rows
    return [y.reshape(len(x), -1), after]


def numbers_of(shape: SsmShape, parts: list[Part]) -> list[Array]:
    """xbc, projected, a_log, dt_bias, skip, state; of those that are `steady` the first, the third and the last."""
    rng, m = np.random.default_rng([shape.heads, shape.state_size, len(parts)]), sum(part.rows for part in parts)
    heads = (shape.heads,)
    a_log = (shape.heads, shape.state_size) if shape.channelwise else heads
    sizes = [(m, shape.channels), (m, shape.width), a_log, heads, heads, (SLOTS, shape.inner * shape.state_size)]
    xbc, projected, *others = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    xbc, projected = xbc.astype(shape.dtype), (4 * projected).astype(shape.dtype)
    return [xbc, others[0], others[-1]] if shape.steady else [xbc, projected, *others]


def scan_call(shape: SsmShape, parts: list[Part]) -> Call:
    """xbc, projected, a_log, dt_bias, skip, step, state, y -> the state in place, and y."""
    *inputs, state = numbers_of(shape, parts)
    (y, after), (y_size, state_size) = scanned(shape, parts, [*inputs, state])
    bound = BOUND * y_size + (2.0**-11 * np.abs(y) if shape.dtype == "float16" else 0)
    out = unwritten(y.shape, shape.dtype)
    at = len(inputs) + 1
    return Call((*inputs, step_of(parts), state, out), {at: (after, BOUND * state_size), at + 1: (y, bound)})
