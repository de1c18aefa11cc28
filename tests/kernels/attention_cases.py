"""Cases of paged attention: sequences of different lengths in one batch, pages in random order.

Slots that hold no token are NaN in half of the pages, and in the others what a sequence before may have left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from tvm import tirx

from tir_schedules.cpu.attention import PAGE, AttentionShape, kv_cache_functions

from .harness import EPS, Array, Call, Case, unwritten

LAYERS = 2
NOTHING_SEEN = -1e30  # log-sum-exp of a query without a visible key: merging must give it no weight
LOG2E = float(np.log2(np.e))

# head_dim 24 64 80 96 128 256 and 6 (two lanes); groups 1 2 3 4 8 5 17; windows within, of, and across pages.
SHAPES = (
    AttentionShape(4, 4, 24, "float32", softcap=5.0, sliding_window=8),
    AttentionShape(8, 4, 64, "float16", sliding_window=40),
    AttentionShape(6, 2, 80, "float32", sliding_window=5),
    AttentionShape(4, 1, 96, "float16", softcap=2.0, sliding_window=16),
    AttentionShape(8, 1, 128, "float32", sliding_window=100),
    AttentionShape(2, 1, 256, "float16", softcap=50.0, sliding_window=33),
    AttentionShape(5, 1, 6, "float32", sliding_window=1),
    AttentionShape(17, 1, 16, "float32", sliding_window=17),
)


@dataclass(frozen=True)
class CacheKernel:
    """One function of the KV cache, by its role in `kv_cache_functions`."""

    shape: AttentionShape
    role: str

    @property
    def symbol(self) -> str:
        return f"{self.role}_{library_of(self.shape)}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return _functions(self.shape)[self.role]


@cache
def _functions(shape: AttentionShape) -> dict[str, tirx.PrimFunc]:
    return kv_cache_functions(shape, LAYERS)


def library_of(s: AttentionShape) -> str:
    """A name for the kernels of one shape."""
    return f"h{s.num_heads}_kv{s.num_kv_heads}_d{s.head_dim}_{s.dtype}_c{s.softcap:g}_w{s.sliding_window}"


@dataclass(frozen=True)
class Sequences:
    """Keys and values of a batch: `k[b]`, `v[b]` [length, kv_heads, D]; in pages, with the tables that find them."""

    k: list[Array]
    v: list[Array]
    pages: Array
    indptr: Array
    values: Array

    def info(self, sliding: bool) -> Array:
        """TVM's length info: tokens in the last page; with window offset and sink size (none) for sliding layers."""
        last = np.array([(len(k) - 1) % PAGE + 1 if len(k) else 0 for k in self.k], np.int32)
        return np.stack([last, 0 * last, 0 * last]) if sliding else last


def sequences(shape: AttentionShape, lengths: Sequence[int], rng: np.random.Generator) -> Sequences:
    """Random keys and values, stored as `append` documents it: K transposed within a page, V by token."""
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    counts = [-(-length // PAGE) for length in lengths]
    order = rng.permutation(sum(counts) + 3).astype(np.int32)
    pages = (4 * rng.standard_normal((len(order), 2, kv_heads, PAGE, dim))).astype(shape.dtype)
    pages[::2] = np.nan
    k = [rng.standard_normal((n, kv_heads, dim)).astype(shape.dtype) for n in lengths]
    v = [rng.standard_normal((n, kv_heads, dim)).astype(shape.dtype) for n in lengths]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    for b, length in enumerate(lengths):
        for t in range(length):
            write_token(pages, int(order[indptr[b] + t // PAGE]), t % PAGE, k[b][t], v[b][t])
    return Sequences(k, v, pages, indptr, order[: indptr[-1]].copy())


def write_token(pages: Array, page: int, slot: int, k: Array, v: Array) -> None:
    """One token into its slot; k, v [kv_heads, D]."""
    _, _, kv_heads, _, dim = pages.shape
    pages[page, 0].reshape(kv_heads, dim, PAGE)[:, :, slot] = k
    pages[page, 1, :, slot] = v


def reference(
    shape: AttentionShape, q: Array, position: int, k: Array, v: Array, first: int, scale: float, window: int
) -> tuple[Array, Array, Array, Array]:
    """Attention of one query [heads, D] at `position` to keys at first, first + 1, ...: output, lse (base 2), bounds.

    The bounds follow the rounding of the dot products; without a visible key the output is anything finite.
    """
    where = first + np.arange(len(k))
    seen = (where <= position) & ((where > position - window) if window else True)
    heads = shape.num_heads
    if not seen.any():
        top = float(np.abs(v.astype(np.float64)).max()) if len(v) else 0.0
        zero = np.zeros((heads, shape.head_dim))
        return zero, np.full(heads, NOTHING_SEEN), zero + top, np.full(heads, 1e28)
    keys = np.repeat(k[seen].astype(np.float64), shape.group, axis=1)
    values = np.repeat(v[seen].astype(np.float64), shape.group, axis=1)
    query = q.astype(np.float64)
    score = np.einsum("hd,thd->ht", query, keys) * scale
    slack = (
        (shape.head_dim + 24) * EPS * (np.einsum("hd,thd->ht", np.abs(query), np.abs(keys)) * abs(scale)).max(axis=1)
    )
    if shape.softcap:
        score = shape.softcap * np.tanh(score / shape.softcap)
        slack = slack + 16 * EPS * shape.softcap
    top = score.max(axis=1, keepdims=True)
    weight = np.exp(score - top)
    total = weight.sum(axis=1, keepdims=True)
    out = np.einsum("ht,thd->hd", weight / total, values)
    lse = (top + np.log(total))[:, 0] * LOG2E
    largest = np.abs(values).max(axis=(0, 2))
    relative = 2 * slack + (len(keys) + 32) * EPS + 4e-7
    stored = 2.0**-11 if shape.dtype == "float16" else EPS
    out_bound = (relative * largest)[:, None] + stored * np.abs(out) + (2.0**-24 if stored > EPS else 0.0)
    return out, lse, out_bound, slack * LOG2E + (len(keys) + 32) * EPS + 4 * EPS * np.abs(lse) + 1e-6


def _attention_call(
    args: list[Array | int | float], rows: list[tuple[Array, Array, Array, Array]], outputs: tuple[int, int]
) -> Call:
    out, lse, out_bound, lse_bound = (np.stack(column) for column in zip(*rows))
    return Call(tuple(args), {outputs[0]: (out, out_bound), outputs[1]: (lse, lse_bound)})


def decode_call(shape: AttentionShape, sliding: bool, lengths: Sequence[int]) -> Call:
    """One query for each sequence, at its last position."""
    rng = np.random.default_rng([shape.head_dim, *lengths])
    batch, window = sequences(shape, lengths, rng), shape.sliding_window if sliding else 0
    q = rng.standard_normal((len(lengths), shape.num_heads, shape.head_dim)).astype(shape.dtype)
    scale = shape.head_dim**-0.5
    starts = np.arange(len(lengths), dtype=np.int32) * 7  # a cache that does not begin at position 0
    rows = [reference(shape, q[b], n - 1, batch.k[b], batch.v[b], 0, scale, window) for b, n in enumerate(lengths)]
    positions = starts + np.array(lengths, np.int32) - 1
    args: list[Array | int | float] = [
        q,
        batch.pages,
        batch.indptr,
        batch.values,
        batch.info(sliding),
        starts,
        positions,
    ]
    args += [unwritten(q.shape, shape.dtype), unwritten(q.shape[:2]), 0, 1.0, 1e4, scale]
    return _attention_call(args, rows, (7, 8))


def cached_call(shape: AttentionShape, sliding: bool, past: Sequence[int], new: Sequence[int], gap: int = 0) -> Call:
    """`new[b]` queries against the `past[b]` tokens in pages; `gap` tokens lie between the two."""
    rng = np.random.default_rng([shape.head_dim, *past, *new])
    batch, window = sequences(shape, past, rng), shape.sliding_window if sliding else 0
    q = rng.standard_normal((sum(new), shape.num_heads, shape.head_dim)).astype(shape.dtype)
    scale = shape.head_dim**-0.5
    q_indptr = np.cumsum([0, *new]).astype(np.int32)
    starts = np.arange(len(past), dtype=np.int32) * 5
    positions, rows = np.zeros(sum(new), np.int32), []
    for b, (history, count) in enumerate(zip(past, new)):
        for i in range(count):
            at = history + gap + i
            positions[q_indptr[b] + i] = starts[b] + at
            rows.append(reference(shape, q[q_indptr[b] + i], at, batch.k[b], batch.v[b], 0, scale, window))
    args: list[Array | int | float] = [q, q_indptr, batch.pages, batch.indptr, batch.values, batch.info(sliding)]
    args += [starts, positions, unwritten(q.shape, shape.dtype), unwritten(q.shape[:2]), 0, 0, 1.0, 1e4, scale]
    return _attention_call(args, rows, (8, 9))


def chunk_call(shape: AttentionShape, new: Sequence[int]) -> Call:
    """Causal attention of new tokens with themselves."""
    rng = np.random.default_rng([shape.head_dim, *new])
    kv_shape = (sum(new), shape.num_kv_heads, shape.head_dim)
    q = rng.standard_normal((sum(new), shape.num_heads, shape.head_dim)).astype(shape.dtype)
    k, v = (rng.standard_normal(kv_shape).astype(shape.dtype) for _ in range(2))
    scale = shape.head_dim**-0.5
    indptr = np.cumsum([0, *new]).astype(np.int32)
    rows = []
    for begin, end in zip(indptr[:-1], indptr[1:]):
        rows += [reference(shape, q[i], i, k[begin:end], v[begin:end], begin, scale, 0) for i in range(begin, end)]
    positions = np.concatenate([np.arange(n) for n in new]).astype(np.int32)
    args: list[Array | int | float] = [q, indptr, k, v, indptr.copy(), positions, np.zeros(len(new), np.int32)]
    args += [unwritten(q.shape, shape.dtype), unwritten(q.shape[:2]), 1, 0, 1.0, 1e4, scale]
    return _attention_call(args, rows, (7, 8))


def cases() -> Iterator[Case]:
    """Every shape through decode, both prefills, with and without window; then timed ones."""
    for s in SHAPES:
        library, w = library_of(s), s.sliding_window
        for sliding in (False, True):
            suffix = "_sliding" if sliding else ""
            decode, cached = CacheKernel(s, f"decode{suffix}"), CacheKernel(s, f"prefill_cached{suffix}")
            for lengths in ([1], [37, 1, 16, 130, 17], [w, w + 1, w + 16]):
                name = f"{decode.symbol}-{lengths}"
                yield Case(name, library, decode, partial(decode_call, s, sliding, lengths))
            for past, new, gap in (([37, 0, 16, 100], [5, 3, 40, 1], 0), ([48], [1], 0), ([32, 5], [20, 2], w + 20)):
                name = f"{cached.symbol}-{past}-{new}-{gap}"
                yield Case(name, library, cached, partial(cached_call, s, sliding, past, new, gap))
        chunk = CacheKernel(s, "prefill_chunk")
        for new in ([1], [7, 0, 33, 1, 64], [16], [17, 90]):
            yield Case(f"{chunk.symbol}-{new}", library, chunk, partial(chunk_call, s, new))
    yield from timed_cases()


def timed_cases() -> Iterator[Case]:
    """Llama 3.2 1B: 32 heads, 8 of keys and values, head_dim 64, in half precision."""
    s = AttentionShape(32, 8, 64, "float16")
    length, new = 2048, 128
    kv_bytes = 2 * 2 * s.num_kv_heads * s.head_dim
    pair = 4 * s.num_heads * s.head_dim  # a score and its share of the output, for all heads
    for role, call, nbytes, pairs in (
        ("decode", partial(decode_call, s, False, [length]), kv_bytes * length, length),
        ("prefill_chunk", partial(chunk_call, s, [new]), kv_bytes * new, new * (new + 1) // 2),
        ("prefill_cached", partial(cached_call, s, False, [512], [new]), kv_bytes * 512, 512 * new),
    ):
        kernel = CacheKernel(s, role)
        yield Case(f"{kernel.symbol}", "timed-attention", kernel, call, nbytes=nbytes, flops=pair * pairs, timed=True)
