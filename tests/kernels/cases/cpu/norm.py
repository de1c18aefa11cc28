"""Cases of RMS and layer norm with and without the addition before them, and of rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from tests.kernels.harness import EPS, KINDS, TINY, Array, Call, Case, adversarial, by_rules, unwritten

EPSILON = 1e-5
# Sizes of 16, 8, 4, 2 lanes and odd ones, for which the rule declines.
SIZES = (16, 96, 24, 20, 22, 33, 1)


@dataclass(frozen=True)
class Norm:
    """rms_norm, or layer_norm when `biases`, the number of its biases, is not None; of a sum when `adds`."""

    size: int
    adds: bool
    weight_dtype: str = "float32"
    biases: int | None = None

    @property
    def symbol(self) -> str:
        layer = "" if self.biases is None else f"layer{self.biases}_"
        return f"{'add_' if self.adds else ''}{layer}norm_{self.size}_{self.weight_dtype}"

    def definition(self) -> tirx.PrimFunc:
        if self.biases is not None:
            return definitions.layer_norm(
                self.size, EPSILON, "float32", self.weight_dtype, biased=bool(self.biases), residual=self.adds
            )
        make = definitions.add_rms_norm if self.adds else definitions.rms_norm
        return make(self.size, EPSILON, "float32", self.weight_dtype)

    def build(self) -> tirx.PrimFunc:
        rule, func = by_rules(self.definition())
        assert rule == ("cpu.elementwise" if self.size % 2 else "cpu.norm")
        return func


@dataclass(frozen=True)
class RopeKernel:
    """q, k, v, cos, sin -> qkv."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    kv_dtype: str

    @property
    def symbol(self) -> str:
        return f"rope_{self.heads}_{self.kv_heads}_{self.head_dim}_{self.rotary_dim}_{self.kv_dtype}"

    def definition(self) -> tirx.PrimFunc:
        return definitions.apply_rope(
            self.heads, self.kv_heads, self.head_dim, self.rotary_dim, "float32", self.kv_dtype
        )

    def build(self) -> tirx.PrimFunc:
        return by_rules(self.definition())[1]


def norm_call(kernel: Norm, m: int, kind: str) -> Call:
    """x [m, size] (or a and b), weight -> (sum,) norm."""
    rng = np.random.default_rng([m, kernel.size])
    inputs = [adversarial(kind, (m, kernel.size), rng) for _ in range(1 + kernel.adds)]
    weight = rng.standard_normal(kernel.size).astype(kernel.weight_dtype)
    total = inputs[0] if not kernel.adds else inputs[0] + inputs[1]
    x = total.astype(np.float64)
    biases = [rng.standard_normal(kernel.size).astype(kernel.weight_dtype) for _ in range(kernel.biases or 0)]
    centred = x if kernel.biases is None else x - x.mean(axis=1, keepdims=True)
    scale = weight.astype(np.float64) / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + EPSILON)
    y = centred * scale + sum(bias.astype(np.float64) for bias in biases)
    # The mean is rounded as much as a sum of all sizes is, and then subtracted.
    lost = 0.0 if kernel.biases is None else np.abs(x).max(axis=1, keepdims=True) * np.abs(scale)
    bound = (kernel.size + 16) * EPS * (np.abs(y) + lost) + 4 * TINY
    outputs = [unwritten(total.shape) for _ in range(1 + kernel.adds)]
    args = (*inputs, weight, *biases, *outputs)
    expected: dict[int, tuple[Array, Array | float]] = {len(args) - 1: (y, bound)}
    if kernel.adds:
        expected[len(args) - 2] = (x, 0.0)
    return Call(args, expected)


def rope_call(kernel: RopeKernel, m: int) -> Call:
    """Pairs (i, i + rotary_dim / 2) turned by the angle whose cos and sin are given."""
    rng = np.random.default_rng(m)
    dim, half = kernel.head_dim, kernel.rotary_dim // 2
    q = adversarial("outlier", (m, kernel.heads, dim), rng)
    k, v = (adversarial("normal", (m, kernel.kv_heads, dim), rng) for _ in range(2))
    angle = rng.uniform(0, 6.3, (m, half))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    both = np.concatenate([q, k], axis=1).astype(np.float64)
    low, high = both[..., :half].copy(), both[..., half : 2 * half].copy()
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    both[..., :half], both[..., half : 2 * half] = low * c - high * s, high * c + low * s
    expected = np.concatenate([both, v.astype(np.float64)], axis=1)
    size = np.zeros_like(expected)
    turned = np.abs(low) + np.abs(high)
    size[:, : kernel.heads + kernel.kv_heads, : 2 * half] = np.concatenate([turned, turned], axis=-1)
    stored = 2.0**-11 if kernel.kv_dtype == "float16" else 0.0
    bound = 4 * EPS * size + (stored * 1.001) * np.abs(expected) + stored * 2.0**-13
    args = (q, k, v, cos, sin, unwritten(expected.shape, kernel.kv_dtype))
    return Call(args, {5: (expected, bound)})


def cases() -> Iterator[Case]:
    """Both norms of all sizes; the two sides of the point from which rows go to all threads."""
    for adds in (False, True):
        for i, size in enumerate(SIZES):
            kernel = Norm(size, adds, "float16" if i % 2 else "float32")
            for m, kind in zip((1, 3, 700, 2), KINDS):
                yield Case(f"{kernel.symbol}-m{m}-{kind}", "norm", kernel, partial(norm_call, kernel, m, kind))
        for i, size in enumerate(SIZES):
            layer = Norm(size, adds, "float16" if i % 2 else "float32", biases=(i + adds) % 2)
            for m, kind in zip((1, 3, 700), KINDS):
                yield Case(f"{layer.symbol}-m{m}-{kind}", "norm", layer, partial(norm_call, layer, m, kind))
        wide = Norm(2304, adds)
        for m in (3, 4):
            yield Case(f"{wide.symbol}-m{m}", "norm", wide, partial(norm_call, wide, m, "normal"))
    for shape in (
        (4, 2, 16, 16, "float32"),
        (3, 1, 24, 24, "float16"),
        (4, 4, 20, 12, "float32"),
        (2, 1, 6, 2, "float16"),
    ):
        rope = RopeKernel(*shape)
        for m in (1, 60):
            yield Case(f"{rope.symbol}-m{m}", "norm", rope, partial(rope_call, rope, m))
    for m in (1, 128):
        timed = Norm(2048, True)
        yield Case(
            f"{timed.symbol}-m{m}",
            "timed-norm",
            timed,
            partial(norm_call, timed, m, "normal"),
            nbytes=16 * m * 2048,
            flops=5 * m * 2048,
            timed=True,
        )
