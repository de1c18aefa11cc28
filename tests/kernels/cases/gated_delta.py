"""Steps of gated delta rules, and what numpy says of them, token by token: for kernels of CPUs and of GPUs."""

from __future__ import annotations

import numpy as np

from tests.kernels.cases.short_conv import SLOTS, Part, step_of
from tests.kernels.harness import EPS, Array, Call, unwritten
from tir_schedules.delta_shape import DeltaShape


def numbers_of(shape: DeltaShape, parts: list[Part]) -> list[Array]:
    """qkv, ba, a_log, dt_bias, state."""
    rng = np.random.default_rng([shape.key_heads, shape.value_heads, shape.key_dim, len(parts)])
    m, heads = sum(part.rows for part in parts), shape.value_heads
    sizes = [
        (m, shape.channels), (m, heads + shape.decays), (heads,), (shape.decays,), (SLOTS, heads * shape.state_size),
    ]  # fmt: skip
    qkv, ba, *others = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    others[0][0], others[1][0] = 12, -16  # a large rate times a softplus near 0
    return [qkv.astype(shape.dtype), ba.astype(shape.dtype), *others]


def ruled(shape: DeltaShape, parts: list[Part], numbers: list[Array]) -> tuple[Array, Array]:
    """y and the state after a step, in float64."""
    qkv, ba, a_log, dt_bias, state = (one.astype(np.float64) for one in numbers)
    heads, keys = shape.value_heads, shape.key_heads * shape.key_dim
    beta = shape.beta_scale / (1 + np.exp(-ba[:, :heads]))
    a, rate = (ba[:, heads:] + dt_bias).reshape(len(ba), heads, -1), np.exp(a_log)[:, None]
    bounded = shape.floor * np.exp(-np.logaddexp(0, -rate * a))
    decay = np.exp(bounded if shape.floor else -rate * np.logaddexp(0, a))
    q, k, v = np.split(qkv, [keys, 2 * keys], axis=1)
    of = np.arange(heads) % shape.key_heads if shape.tiled else np.arange(heads) // (heads // shape.key_heads)
    q, k = (one.reshape(-1, shape.key_heads, shape.key_dim)[:, of] for one in (q, k))
    q, k = (one / np.sqrt((one**2).sum(axis=2, keepdims=True) + 1e-6) for one in (q, k))
    v, y, after, row = v.reshape(-1, heads, shape.value_dim), [], state.copy(), 0
    size = (heads, shape.key_dim, shape.value_dim)
    stored = (heads, shape.value_dim // shape.columns, shape.key_dim, shape.columns)
    for part in parts:
        slots = dict(zip(range(row, row + part.rows), (*part.drafts, -1)))
        slots[row + part.rows - 1] = part.write
        s = np.zeros(size)
        if part.read >= 0:
            s = state[part.read].reshape(stored).swapaxes(1, 2).reshape(size)
        for i in range(row, row + part.rows):
            s = s * decay[i][:, :, None]
            correction = beta[i][:, None] * (v[i] - np.einsum("hi,hij->hj", k[i], s))
            s = s + k[i][:, :, None] * correction[:, None]
            y.append(np.einsum("hi,hij->hj", q[i], s).ravel() * shape.key_dim**-0.5)
            if (slot := slots.get(i, -1)) >= 0 and not (shape.many and i + 1 < row + part.rows):
                after[slot] = s.reshape(heads, shape.key_dim, -1, shape.columns).swapaxes(1, 2).ravel()
        row += part.rows
    return np.stack(y), after


def delta_call(shape: DeltaShape, parts: list[Part]) -> Call:
    """qkv, ba, a_log, dt_bias, step, state, y -> the state in place, and y."""
    *inputs, state = numbers = numbers_of(shape, parts)
    y, after = ruled(shape, parts, numbers)
    bound = 64 * EPS * (1 + np.abs(after).max())
    rounding = 2.0**-11 * np.abs(y) if shape.dtype == "float16" else 0
    out = unwritten(y.shape, shape.dtype)
    return Call((*inputs, step_of(parts), state, out), {5: (after, bound), 6: (y, bound + rounding)})
