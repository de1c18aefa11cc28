"""The recurrence of RWKV-7, and what numpy says of it: for kernels of CPUs and of GPUs.

Formula: Peng et al. 2025, "RWKV-7 Goose", equations 15 and 17, with the state transposed.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.cases.short_conv import SLOTS, Part, step_of
from tests.kernels.harness import Array, Call, unwritten
from tir_schedules.rwkv_shape import RwkvShape

BOUND = 2.0**-17  # of the magnitudes that a number is made of


def _scanned(shape: RwkvShape, parts: list[Part], inputs: list[Array], state: Array) -> list[Array]:
    r, w, k, v, a, b = (one.reshape(-1, shape.heads, shape.dim) for one in inputs)
    after, y, row = state.copy(), np.empty_like(r), 0
    for part in parts:
        own = np.zeros((shape.heads, shape.dim, shape.dim))
        if part.read >= 0:
            own = state[part.read].reshape(own.shape)
        slots = dict(zip(range(row, row + part.rows), (*part.drafts, -1)))
        slots[row + part.rows - 1] = part.write
        for i in range(row, row + part.rows):
            removed = np.einsum("hi,hij->hj", a[i], own)
            own = w[i][:, :, None] * own + b[i][:, :, None] * removed[:, None] + k[i][:, :, None] * v[i][:, None]
            y[i] = np.einsum("hi,hij->hj", r[i], own)
            if (slot := slots.get(i, -1)) >= 0:
                after[slot] = own.ravel()
        row += part.rows
    return [y.reshape(len(r), -1), after]


def rwkv_call(shape: RwkvShape, parts: list[Part]) -> Call:
    """r, w, k, v, a, b, step, state, y -> the state in place, and y. Keys that are removed have the length 1."""
    rng, m = np.random.default_rng([shape.heads, shape.dim, len(parts)]), sum(part.rows for part in parts)
    r, k, v, a = (rng.standard_normal((m, shape.heads, shape.dim)) for _ in range(4))
    w, iclr = (rng.uniform(low, 1, (m, shape.heads, shape.dim)) for low in (0.55, 0))
    a /= np.linalg.norm(a, axis=2, keepdims=True)
    inputs = [one.reshape(m, -1).astype(np.float32) for one in (r, w, k, v, a, -a * iclr)]
    state = rng.standard_normal((SLOTS, shape.heads * shape.state_size)).astype(np.float32)
    wide = [one.astype(np.float64) for one in (*inputs, state)]
    y, after = _scanned(shape, parts, wide[:-1], wide[-1])
    y_size, state_size = _scanned(shape, parts, [np.abs(one) for one in wide[:-1]], np.abs(wide[-1]))
    out = unwritten(y.shape, "float32")
    return Call((*inputs, step_of(parts), state, out), {7: (after, BOUND * state_size), 8: (y, BOUND * y_size)})
