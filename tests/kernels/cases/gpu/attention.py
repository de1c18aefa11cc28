"""Attention over TVM's KV cache, as browsers have it, against numpy in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import tirx

from tests.kernels.cases.gpu.case import Array, Call, Knobs, assert_near, by_rules
from tests.kernels.cases.steps import sinks_of
from tir_schedules.gpu.attention.cache import kv_cache_functions
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.paged import PAGE

SCALE = 0.2
NUMBERS = (0, 1.0, 1.0, SCALE)  # what TVM's cache passes at the end
NOTHING_SEEN = -1e30
# Of the largest output, and of log-sum-exps. float16: rounded inputs of matrix units, sums in float32, float16 out.
TOLERANCES = {"float32": (2e-6, 1e-5), "float16": (2e-3, 2e-3)}


def attention(s: AttentionShape, q: Array, k: Array, v: Array, oldest: int, scale: float) -> tuple[Array, Array]:
    """One query [heads, D] over keys from `oldest`: output and log2 of the sum of 2**score, in float64."""
    out, lse = np.empty((s.num_heads, s.v_dim)), np.empty(s.num_heads)
    for head in range(s.num_heads):
        scores = k[oldest:, head // s.group].astype(np.float64) @ q[head].astype(np.float64) * scale
        if s.softcap:
            scores = np.tanh(scores / s.softcap) * s.softcap
        weights = np.exp(scores - scores.max())
        sink = np.exp(sinks_of(s)[head] - scores.max())
        out[head] = weights @ v[oldest:, head // s.group].astype(np.float64) / (weights.sum() + sink)
        lse[head] = (np.log(weights.sum()) + scores.max()) / np.log(2)
    return out, lse


@dataclass(frozen=True)
class Pages:
    """Sequences of keys and values, in pages whose numbers are shuffled."""

    shape: AttentionShape
    lengths: tuple[int, ...]

    def arrays(self) -> tuple[list[Array], list[Array], Array, Array, Array, Array]:
        """K and V of each sequence [length, kv heads, dim]; pages, indptr, indices, length of last pages."""
        s, rng = self.shape, np.random.default_rng(sum(self.lengths))
        counts = [-(-length // PAGE) for length in self.lengths]
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        indices = rng.permutation(int(indptr[-1]) + 2)[: indptr[-1]].astype(np.int32)
        pages = rng.standard_normal((int(indptr[-1]) + 2, s.num_kv_heads, 2 * PAGE * s.head_dim)).astype(s.dtype)
        keys, values = [], []
        for b, length in enumerate(self.lengths):
            shape = (length, s.num_kv_heads, s.head_dim)
            k, v = (rng.standard_normal(shape).astype(s.dtype) for _ in range(2))
            for t in range(length):
                page = pages[indices[indptr[b] + t // PAGE]]
                half = PAGE * s.head_dim
                page[:, :half].reshape(-1, s.head_dim, PAGE)[:, :, t % PAGE] = k[t]
                page[:, half:].reshape(-1, PAGE, s.head_dim)[:, t % PAGE] = v[t]
            keys.append(k)
            values.append(v)
        last = np.array([(length - 1) % PAGE + 1 for length in self.lengths], np.int32)
        return keys, values, pages, indptr, indices, last


def _assert_row(
    found: list[Array], row: int, q: Array, shape: AttentionShape, k: Array, v: Array, oldest: int = 0
) -> None:
    """Output and sum of one query over keys from `oldest` on. Sinks are counted later, by sums in further heads."""
    heads = shape.num_heads
    out, lse = found[-2][row, :heads].astype(np.float64), found[-1][row, :heads]
    if oldest >= len(k):
        assert np.all(lse < NOTHING_SEEN) and not out.any()
        return
    expected, sums = attention(replace(shape, sinks=False), q[row], k, v, oldest, SCALE)
    of_output, of_sums = TOLERANCES[shape.dtype]
    assert_near(out, expected, of_output)
    np.testing.assert_allclose(lse, sums, rtol=0, atol=of_sums)
    if shape.sum_heads:
        said = found[-2][row, heads:].reshape(2, -1)[:, :heads].astype(np.float64).sum(axis=0)
        np.testing.assert_allclose(said, lse, rtol=2.0**-20, atol=1e-6)


def _scheduled(shape: AttentionShape, role: str, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
    return {"main": by_rules(kv_cache_functions(shape, 1)[role], knobs)}


def _suffix(shape: AttentionShape) -> str:
    """Layers with a window have functions of their own, unless all have it."""
    return "_sliding" if shape.sliding_window and not shape.all_slide else ""


def _cache(shape: AttentionShape, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Pages, indptr, indices, lengths and offsets, as TVM passes them. Layers with a window get lengths i32[3, b]:
    tokens in the last page, window offset, sink size (none)."""
    pages, indptr, indices, last = arrays
    length = np.stack([last, 0 * last, 0 * last]) if _suffix(shape) else last
    tvm_pages = pages.reshape(len(pages), 2, shape.num_kv_heads, PAGE, shape.head_dim)
    return tvm_pages, indptr, indices, length, np.zeros_like(last)


def _outputs(q: Array) -> tuple[Array, Array]:
    """Output and sums before a call: all that is not written shows."""
    return np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)


def _queries(shape: AttentionShape, count: int, seed: int) -> Array:
    heads = shape.num_heads + shape.sum_heads
    return np.random.default_rng(seed).standard_normal((count, heads, shape.head_dim)).astype(shape.dtype)


@dataclass(frozen=True)
class Decode:
    """A query of each of some sequences against their pages; long sequences are split into parts."""

    shape: AttentionShape
    lengths: tuple[int, ...]

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, f"decode{_suffix(self.shape)}", knobs)

    def calls(self) -> Sequence[Call]:
        keys, values, *arrays = Pages(self.shape, self.lengths).arrays()
        q, window = _queries(self.shape, len(self.lengths), 7), self.shape.sliding_window

        def check(found: list[Array]) -> None:
            for b, length in enumerate(self.lengths):
                oldest = max(length - window + 1, 0) if window else 0
                _assert_row(found, b, q, self.shape, keys[b], values[b], oldest)

        positions = np.array(self.lengths, np.int32)
        return [Call((q, *_cache(self.shape, tuple(arrays)), positions, *_outputs(q), *NUMBERS), check)]


@dataclass(frozen=True)
class Cached:
    """New tokens of sequences against the pages of those before them."""

    shape: AttentionShape
    lengths: tuple[int, ...]
    fresh: tuple[int, ...]

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, f"prefill_cached{_suffix(self.shape)}", knobs)

    def calls(self) -> Sequence[Call]:
        keys, values, *arrays = Pages(self.shape, self.lengths).arrays()
        q, window = _queries(self.shape, sum(self.fresh), 9), self.shape.sliding_window
        begins = np.cumsum([0, *self.fresh]).astype(np.int32)
        counts = zip(self.fresh, self.lengths)
        positions = np.concatenate([np.arange(n) + before for n, before in counts]).astype(np.int32)

        def check(found: list[Array]) -> None:
            for b, begin in enumerate(begins[:-1]):
                for row in range(begin, begins[b + 1]):
                    oldest = max(int(positions[row]) - window + 1, 0) if window else 0
                    _assert_row(found, row, q, self.shape, keys[b], values[b], oldest)

        cache = _cache(self.shape, tuple(arrays))
        return [Call((q, begins, *cache, positions, *_outputs(q), 0, *NUMBERS), check)]


@dataclass(frozen=True)
class Chunk:
    """Tokens of sequences among themselves: each sees those up to itself."""

    shape: AttentionShape
    fresh: tuple[int, ...]

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, "prefill_chunk", knobs)

    def calls(self) -> Sequence[Call]:
        s, rng, n = self.shape, np.random.default_rng(11), sum(self.fresh)
        q, k, v = (
            rng.standard_normal((n, heads, s.head_dim)).astype(s.dtype)
            for heads in (s.num_heads + s.sum_heads, s.num_kv_heads, s.num_kv_heads)
        )
        begins = np.cumsum([0, *self.fresh]).astype(np.int32)

        def check(found: list[Array]) -> None:
            for first, end in zip(begins[:-1], begins[1:]):
                for row in range(first, end):
                    _assert_row(found, row, q, s, k[first : row + 1], v[first : row + 1])

        positions = np.concatenate([np.arange(n) for n in self.fresh]).astype(np.int32)
        offsets = np.zeros(len(self.fresh), np.int32)
        return [Call((q, begins, k, v, begins, positions, offsets, *_outputs(q), 1, *NUMBERS), check)]


_ONE_KV_HEAD = AttentionShape(4, 1, 64, "float16")
_TWO_KV_HEADS = AttentionShape(4, 2, 64, "float16")
DECODE_SMALL = {
    "decode": Decode(AttentionShape(8, 2, 64, "float32"), (1, 40, 200)),
    "decode, window": Decode(AttentionShape(6, 1, 24, "float32", sliding_window=37, all_slide=True), (5, 90, 150)),
    "decode, 16 heads of one KV head": Decode(AttentionShape(16, 1, 16, "float32"), (20,)),
    "decode, sinks": Decode(AttentionShape(20, 2, 16, "float32", sinks=True), (1, 40, 200)),
    "decode, softcap in float16": Decode(AttentionShape(4, 4, 80, "float16", softcap=5.0), (16, 33)),
}
DECODE = {
    "decode, one part": Decode(_TWO_KV_HEADS, (1, 40)),
    "decode, two sequences in parts": Decode(_TWO_KV_HEADS, (1, 300)),
    "decode, 1k": Decode(_ONE_KV_HEAD, (1000,)),
    "decode, 8k": Decode(_ONE_KV_HEAD, (8192,)),
    "decode, a layer with a window": Decode(replace(_ONE_KV_HEAD, sliding_window=50), (300, 30)),
    "decode, all layers with a window": Decode(replace(_ONE_KV_HEAD, sliding_window=100, all_slide=True), (700,)),
    "decode, sinks in float16": Decode(replace(_TWO_KV_HEADS, sinks=True), (1, 300)),
    "decode, heads of odd size": Decode(AttentionShape(4, 4, 72, "float16", softcap=5.0), (16, 333)),
    "decode, 256 dimensions": Decode(AttentionShape(4, 2, 256, "float16"), (500,)),
}
PREFILL = {
    "cached": Cached(_TWO_KV_HEADS, (40, 17), (5, 30)),
    "cached, window": Cached(replace(_ONE_KV_HEAD, sliding_window=12, all_slide=True), (70,), (20,)),
    "cached, a layer with a window": Cached(replace(_ONE_KV_HEAD, sliding_window=20), (50,), (18,)),
    "cached, sinks": Cached(replace(_TWO_KV_HEADS, sinks=True), (40, 17), (5, 30)),
    "cached, softcap": Cached(AttentionShape(2, 1, 128, "float16", softcap=5.0), (33,), (18,)),
    "chunk": Chunk(_TWO_KV_HEADS, (5, 37)),
    "chunk, sinks": Chunk(replace(_TWO_KV_HEADS, sinks=True), (5, 37)),
    "chunk, odd heads": Chunk(AttentionShape(3, 1, 80, "float16", softcap=5.0), (20,)),
    "chunk, 256 dimensions": Chunk(AttentionShape(2, 1, 256, "float16"), (40,)),
}
CASES = {**DECODE_SMALL, **DECODE, **PREFILL}
