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
    AttentionShape(14, 2, 64, "q8", sliding_window=40),
    AttentionShape(4, 4, 80, "q8", softcap=5.0, sliding_window=5),
    AttentionShape(4, 1, 256, "q8", sliding_window=100),
    AttentionShape(3, 1, 6, "q8", sliding_window=1),
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
class Stored:
    """K or V [..., kv_heads, D] as the cache keeps it: elements, and for q8 scales float16 [..., kv_heads, groups]."""

    elements: Array
    scales: Array | None

    def values(self) -> Array:
        """The float64 numbers that these stand for."""
        x = self.elements.astype(np.float64)
        if self.scales is None:
            return x
        groups = self.scales.shape[-1]
        split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
        return (split * self.scales.astype(np.float64)[..., None]).reshape(x.shape)

    def rows(self, shape: AttentionShape) -> Array:
        """int8 [..., cache_kv_heads, cache_head_dim]: each token's elements and then its scales."""
        lead = self.elements.shape[:-2]
        parts = [self.elements.reshape(*lead, -1).view(np.int8)]
        if self.scales is not None:
            parts.append(self.scales.reshape(*lead, -1).view(np.int8))
        return np.concatenate(parts, axis=-1).reshape(*lead, shape.cache_kv_heads, shape.cache_head_dim)


def stored(shape: AttentionShape, x: Array) -> Stored:
    """What `split` makes of K or V f32[..., kv_heads, D] (AttentionShape says how)."""
    if shape.dtype != "q8":
        return Stored(x.astype(shape.dtype), None)
    groups = shape.scale_groups
    split = x.astype(np.float32).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    scale = np.minimum(np.abs(split).max(axis=-1) * np.float32(1 / 127), np.float32(65504)).astype(np.float16)
    step = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    codes = np.clip(np.rint(split * inverse[..., None]), -127, 127)
    return Stored(codes.astype(np.int8).reshape(x.shape), scale)


@dataclass(frozen=True)
class Sequences:
    """Keys and values of a batch: `k[b]`, `v[b]` float64 [length, kv_heads, D]; in pages, with the tables that find them."""

    k: list[Array]
    v: list[Array]
    pages: Array
    indptr: Array
    values: Array

    def info(self, sliding: bool) -> Array:
        """TVM's length info: tokens in the last page; with window offset and sink size (none) for sliding layers."""
        last = np.array([(len(k) - 1) % PAGE + 1 if len(k) else 0 for k in self.k], np.int32)
        return np.stack([last, 0 * last, 0 * last]) if sliding else last


def no_pages(shape: AttentionShape, count: int) -> Array:
    """Pages int8[count, 2, cache_kv_heads, 16, cache_head_dim] of NaN (all bits set; codes of -1 for q8)."""
    return np.full((count, 2, shape.cache_kv_heads, PAGE, shape.cache_head_dim), -1, np.int8)


def sequences(shape: AttentionShape, lengths: Sequence[int], rng: np.random.Generator) -> Sequences:
    """Random keys and values, stored as `append` documents it: K transposed within a page, V by token."""
    kv_heads, dim = shape.num_kv_heads, shape.head_dim
    counts = [-(-length // PAGE) for length in lengths]
    order = rng.permutation(sum(counts) + 3).astype(np.int32)
    pages = no_pages(shape, len(order))
    for page in range(1, len(order), 2):
        old = [stored(shape, 4 * rng.standard_normal((PAGE, kv_heads, dim))) for _ in range(2)]
        for slot in range(PAGE):
            write_token(shape, pages, page, slot, *old, slot)
    k = [stored(shape, rng.standard_normal((n, kv_heads, dim))) for n in lengths]
    v = [stored(shape, rng.standard_normal((n, kv_heads, dim))) for n in lengths]
    indptr = np.cumsum([0, *counts]).astype(np.int32)
    for b, length in enumerate(lengths):
        for t in range(length):
            write_token(shape, pages, int(order[indptr[b] + t // PAGE]), t % PAGE, k[b], v[b], t)
    return Sequences([x.values() for x in k], [x.values() for x in v], pages, indptr, order[: indptr[-1]].copy())


def write_token(shape: AttentionShape, pages: Array, page: int, slot: int, k: Stored, v: Stored, t: int) -> None:
    """Token t of k and v into its slot, as `kv_pages.py` says."""
    dim, half = shape.head_dim, PAGE * shape.head_dim * k.elements.itemsize
    for h, head in enumerate(pages[page].reshape(shape.num_kv_heads, shape.head_bytes)):
        head[:half].view(k.elements.dtype).reshape(dim, PAGE)[:, slot] = k.elements[t, h]
        head[half : 2 * half].view(v.elements.dtype).reshape(PAGE, dim)[slot] = v.elements[t, h]
        if k.scales is not None and v.scales is not None:
            scales = head[2 * half :].view(np.float16).reshape(2, shape.scale_groups, PAGE)
            scales[0, :, slot], scales[1, :, slot] = k.scales[t, h], v.scales[t, h]


def as_rows(shape: AttentionShape, x: Array) -> Array:
    """float32 [n, heads, D] at the beginning of int8 [n, cache_heads, cache_head_dim]; the rest NaN."""
    rows = np.full((len(x), shape.cache_heads, shape.cache_head_dim), -1, np.int8)
    rows.reshape(-1).view(np.float32)[: x.size] = x.reshape(-1)
    return rows


def of_rows(shape: AttentionShape, rows: Array) -> Array:
    """The inverse of `as_rows`."""
    n = len(rows)
    found: Array = rows.reshape(-1).view(np.float32)[: n * shape.num_heads * shape.head_dim]
    return found.reshape(n, shape.num_heads, shape.head_dim)


def sum_rows(shape: AttentionShape, sums: Array) -> Array:
    """Log-sum-exps f32[n, heads] at the beginning of f32[n, cache_heads]; the rest NaN."""
    rows = np.full((len(sums), shape.cache_heads), np.nan, np.float32)
    rows.reshape(-1)[: sums.size] = sums.reshape(-1)
    return rows


def of_sum_rows(shape: AttentionShape, rows: Array) -> Array:
    """The inverse of `sum_rows`."""
    found: Array = rows.reshape(-1)[: len(rows) * shape.num_heads].reshape(len(rows), shape.num_heads)
    return found


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
    out_bound = (relative * largest)[:, None] + EPS * np.abs(out)
    return out, lse, out_bound, slack * LOG2E + (len(keys) + 32) * EPS + 4 * EPS * np.abs(lse) + 1e-6


def _attention_call(
    shape: AttentionShape,
    args: list[Array | int | float],
    rows: list[tuple[Array, Array, Array, Array]],
    outputs: tuple[int, int],
) -> Call:
    out, lse, out_bound, lse_bound = (np.stack(column) for column in zip(*rows))
    views = {outputs[0]: partial(of_rows, shape), outputs[1]: partial(of_sum_rows, shape)}
    return Call(tuple(args), {outputs[0]: (out, out_bound), outputs[1]: (lse, lse_bound)}, views)


def _unwritten(shape: AttentionShape, n: int) -> list[Array]:
    """Output and log-sum-exps of n queries before the call."""
    return [as_rows(shape, unwritten((n, shape.num_heads, shape.head_dim))), unwritten((n, shape.cache_heads))]


def decode_call(shape: AttentionShape, sliding: bool, lengths: Sequence[int]) -> Call:
    """One query for each sequence, at its last position."""
    rng = np.random.default_rng([shape.head_dim, *lengths])
    batch, window = sequences(shape, lengths, rng), shape.sliding_window if sliding else 0
    q = rng.standard_normal((len(lengths), shape.num_heads, shape.head_dim)).astype(np.float32)
    scale = shape.head_dim**-0.5
    starts = np.arange(len(lengths), dtype=np.int32) * 7  # a cache that does not begin at position 0
    rows = [reference(shape, q[b], n - 1, batch.k[b], batch.v[b], 0, scale, window) for b, n in enumerate(lengths)]
    positions = starts + np.array(lengths, np.int32) - 1
    args: list[Array | int | float] = [
        as_rows(shape, q),
        batch.pages,
        batch.indptr,
        batch.values,
        batch.info(sliding),
        starts,
        positions,
    ]
    args += [*_unwritten(shape, len(q)), 0, 1.0, 1e4, scale]
    return _attention_call(shape, args, rows, (7, 8))


def cached_call(shape: AttentionShape, sliding: bool, past: Sequence[int], new: Sequence[int], gap: int = 0) -> Call:
    """`new[b]` queries against the `past[b]` tokens in pages; `gap` tokens lie between the two."""
    rng = np.random.default_rng([shape.head_dim, *past, *new])
    batch, window = sequences(shape, past, rng), shape.sliding_window if sliding else 0
    q = rng.standard_normal((sum(new), shape.num_heads, shape.head_dim)).astype(np.float32)
    scale = shape.head_dim**-0.5
    q_indptr = np.cumsum([0, *new]).astype(np.int32)
    starts = np.arange(len(past), dtype=np.int32) * 5
    positions, rows = np.zeros(sum(new), np.int32), []
    for b, (history, count) in enumerate(zip(past, new)):
        for i in range(count):
            at = history + gap + i
            positions[q_indptr[b] + i] = starts[b] + at
            rows.append(reference(shape, q[q_indptr[b] + i], at, batch.k[b], batch.v[b], 0, scale, window))
    args: list[Array | int | float] = [
        as_rows(shape, q),
        q_indptr,
        batch.pages,
        batch.indptr,
        batch.values,
        batch.info(sliding),
    ]
    args += [starts, positions, *_unwritten(shape, len(q)), 0, 0, 1.0, 1e4, scale]
    return _attention_call(shape, args, rows, (8, 9))


def chunk_call(shape: AttentionShape, new: Sequence[int]) -> Call:
    """Causal attention of new tokens with themselves."""
    rng = np.random.default_rng([shape.head_dim, *new])
    kv_shape = (sum(new), shape.num_kv_heads, shape.head_dim)
    q = rng.standard_normal((sum(new), shape.num_heads, shape.head_dim)).astype(np.float32)
    new_k, new_v = (stored(shape, rng.standard_normal(kv_shape)) for _ in range(2))
    k, v = new_k.values(), new_v.values()
    scale = shape.head_dim**-0.5
    indptr = np.cumsum([0, *new]).astype(np.int32)
    rows = []
    for begin, end in zip(indptr[:-1], indptr[1:]):
        rows += [reference(shape, q[i], i, k[begin:end], v[begin:end], begin, scale, 0) for i in range(begin, end)]
    positions = np.concatenate([np.arange(n) for n in new]).astype(np.int32)
    args: list[Array | int | float] = [as_rows(shape, q), indptr, new_k.rows(shape), new_v.rows(shape), indptr.copy()]
    args += [positions, np.zeros(len(new), np.int32), *_unwritten(shape, len(q)), 1, 0, 1.0, 1e4, scale]
    return _attention_call(shape, args, rows, (7, 8))


def cases() -> Iterator[Case]:
    """Every shape through decode, both prefills, with and without window; then timed ones."""
    for s in SHAPES:
        library, w = library_of(s), s.sliding_window
        for sliding in (False, True):
            suffix = "_sliding" if sliding else ""
            decode, cached = CacheKernel(s, f"decode{suffix}"), CacheKernel(s, f"prefill_cached{suffix}")
            for lengths in ([1], [37, 1, 16, 130, 17], [w, w + 1, w + 16], [700, 64, 333]):
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
    """Llama 3.2 1B, Qwen2 0.5B and a model with head_dim 128: decode at 4096 tokens, prefill of 512 after 1536."""
    for heads, kv_heads, dim in ((32, 8, 64), (14, 2, 64), (32, 8, 128)):
        for dtype in ("float16", "q8"):
            s = AttentionShape(heads, kv_heads, dim, dtype)
            length, past, new = 4096, 1536, 512
            pair = 4 * heads * dim  # a score and its share of the output, for all heads
            for role, call, tokens, pairs in (
                ("decode", partial(decode_call, s, False, [length]), length, length),
                ("prefill_chunk", partial(chunk_call, s, [new]), new, new * (new + 1) // 2),
                ("prefill_cached", partial(cached_call, s, False, [past], [new]), past, past * new),
            ):
                kernel = CacheKernel(s, role)
                yield Case(
                    f"{kernel.symbol}",
                    f"timed-attention-{library_of(s)}",
                    kernel,
                    call,
                    nbytes=s.bytes_per_token * tokens,
                    flops=pair * pairs,
                    timed=True,
                )
