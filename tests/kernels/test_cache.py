"""Upkeep of the KV cache's pages: append, split, merge, copy, compact, read back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import tvm

from tir_schedules.cpu.attention import PAGE, AttentionShape

from .attention_cases import (
    LAYERS,
    SHAPES,
    CacheKernel,
    as_rows,
    decode_call,
    no_pages,
    of_rows,
    of_sum_rows,
    reference,
    sequences,
    stored,
    sum_rows,
    write_token,
)
from .harness import (
    KINDS,
    Array,
    Call,
    adversarial,
    assert_outputs,
    assert_within,
    compile_together,
    tensors,
    unwritten,
)

ROLES = ("append", "split", "merge", "copy_page", "compact", "read_back")


@pytest.fixture(params=SHAPES, ids=lambda s: f"d{s.head_dim}-{s.dtype}")
def shape(request: pytest.FixtureRequest) -> AttentionShape:
    found: AttentionShape = request.param
    return found


@cache
def functions(shape: AttentionShape) -> Mapping[str, Any]:
    return compile_together({role: CacheKernel(shape, role).build() for role in ROLES})


def tokens(shape: AttentionShape, n: int, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    size = (n, shape.num_kv_heads, shape.head_dim)
    return rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)


def slots(rng: np.random.Generator, pages: int, n: int) -> Array:
    return rng.permutation(pages * PAGE)[:n].astype(np.int32)


def pages_of(shape: AttentionShape, where: Array, k: Array, v: Array, pages: int) -> Array:
    """Pages of NaN with tokens at slots `where`."""
    array, kept_k, kept_v = no_pages(shape, pages), stored(shape, k), stored(shape, v)
    for token, slot in enumerate(where):
        if slot >= 0:
            write_token(shape, array, int(slot) // PAGE, int(slot) % PAGE, kept_k, kept_v, token)
    return array


def exactly(array: Array) -> tuple[Array, float]:
    return array.astype(np.float64), 0.0


def no_rows(shape: AttentionShape, *lead: int) -> Array:
    return np.full((*lead, shape.cache_kv_heads, shape.cache_head_dim), -1, np.int8)


def test_append_writes_its_slots_and_no_other(shape: AttentionShape) -> None:
    k, v = tokens(shape, 21)
    where = slots(np.random.default_rng(1), 4, 21)
    where[[3, 20]] = -1
    args = (no_pages(shape, 4), stored(shape, k).rows(shape), stored(shape, v).rows(shape), where)
    assert_outputs(functions(shape)["append"], Call(args, {0: exactly(pages_of(shape, where, k, v, 4))}))


@pytest.mark.parametrize("n", [1, 7, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_split_converts_k_and_v(shape: AttentionShape, kind: str, n: int) -> None:
    h, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = adversarial(kind, (n, h + 2 * kv, dim), np.random.default_rng(0))
    q, k, v = np.split(qkv, [h, h + kv], axis=1)
    seen = qkv.reshape(-1).view(np.int8).reshape(n, -1, shape.cache_head_dim)
    outputs = [as_rows(shape, unwritten(q.shape)), no_rows(shape, n), no_rows(shape, n)]
    expected = [np.ascontiguousarray(q), stored(shape, k).rows(shape), stored(shape, v).rows(shape)]
    call = Call(
        (seen, np.arange(n, dtype=np.int32), *outputs, 0),
        {2 + i: exactly(x) for i, x in enumerate(expected)},
        {2: partial(of_rows, shape)},
    )
    assert_outputs(functions(shape)["split"], call)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e3])
def test_int8_error_is_as_stated(kind: str, size: float) -> None:
    """AttentionShape's bound, per group of dimensions: an outlier costs its own group and no other."""
    for shape in SHAPES:
        if shape.dtype == "q8":
            x = adversarial(kind, (50, shape.num_kv_heads, shape.head_dim), np.random.default_rng(5), size)
            groups = (*x.shape[:-1], shape.scale_groups, -1)
            error = np.abs(stored(shape, x).values() - x).reshape(groups).max(axis=-1)
            assert (error <= 0.004 * np.abs(x).reshape(groups).max(axis=-1) + 4e-6).all()


def test_read_back_gives_one_layer(shape: AttentionShape) -> None:
    k, v = tokens(shape, 9)
    where = slots(np.random.default_rng(2), 3, 9)
    expected = {}
    for index, array in ((2, k), (3, v)):
        both = no_rows(shape, LAYERS, 9)
        both[1] = stored(shape, array).rows(shape)
        expected[index] = exactly(both)
    args = (pages_of(shape, where, k, v, 3), where, no_rows(shape, LAYERS, 9), no_rows(shape, LAYERS, 9), 1)
    assert_outputs(functions(shape)["read_back"], Call(args, expected))


def test_copy_page_copies_the_page(shape: AttentionShape) -> None:
    k, v = tokens(shape, 2 * PAGE)
    before = pages_of(shape, np.arange(2 * PAGE, dtype=np.int32), k, v, 3)
    after = before.copy()
    after[2] = before[1]
    assert_outputs(functions(shape)["copy_page"], Call((before, 1, 2, 7), {0: exactly(after)}))


def test_compact_moves_tokens_of_each_sequence(shape: AttentionShape) -> None:
    """Pairs go from -> to, one after another, also across pages; the second sequence has none."""
    k, v = tokens(shape, 3 * PAGE)
    before = pages_of(shape, np.arange(3 * PAGE, dtype=np.int32), k, v, 3)
    indptr = np.array([0, 2, 2, 5], np.int32)
    pairs = np.array([[5, 9, 40, 41, 47], [3, 4, 16, 20, 41]], np.int32)
    slot = np.arange(3 * PAGE)
    for source, target in pairs.T:
        slot[target] = slot[source]
    after = pages_of(shape, np.arange(3 * PAGE, dtype=np.int32), k[slot], v[slot], 3)
    assert_outputs(functions(shape)["compact"], Call((before, indptr, pairs, 3), {0: exactly(after)}))


def test_merge_weighs_by_the_sums(shape: AttentionShape) -> None:
    """Rows with equal sums, with far ones, and with one side or both that saw no key."""
    rng = np.random.default_rng(0)
    size = (8, shape.num_heads, shape.head_dim)
    v, other = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    s, s_other = (rng.uniform(-20, 20, size[:2]).astype(np.float32) for _ in range(2))
    s[1], s_other[2] = -1e30, -1e30
    s[3] = s_other[3]
    s[4], s_other[4] = 500, -500
    s[5] = s_other[5] = -1e30
    top = np.maximum(s, s_other).astype(np.float64)
    a, b = np.exp2(s - top), np.exp2(s_other - top)
    share = (a / (a + b))[..., None]
    expected = v.astype(np.float64) * share + other.astype(np.float64) * (1 - share)
    # The exponents' difference is rounded in float32: relative 40 * 2**-24 in a weight.
    bound = 1e-5 * np.maximum(np.abs(v), np.abs(other)).astype(np.float64)
    sums = top + np.log2(a + b)
    call = Call(
        (as_rows(shape, v), sum_rows(shape, s), as_rows(shape, other), sum_rows(shape, s_other)),
        {0: (expected, bound), 1: (sums, 2e-7 * np.abs(sums) + 1e-6)},
        {0: partial(of_rows, shape), 1: partial(of_sum_rows, shape)},
    )
    assert_outputs(functions(shape)["merge"], call)


@pytest.mark.parametrize("outliers", [1.0, 30.0])
def test_int8_attention_is_near_that_of_exact_keys(outliers: float) -> None:
    """Scores move by at most sum|q| times the error of K, the output by that relative to V and by the error of V."""
    shape, length = AttentionShape(14, 2, 64, "q8"), 300
    rng = np.random.default_rng(9)
    q = rng.standard_normal((shape.num_heads, shape.head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((length, shape.num_kv_heads, shape.head_dim)).astype(np.float32) for _ in range(2))
    k[..., ::37] *= outliers
    scale = shape.head_dim**-0.5 / outliers
    exact, _, _, _ = reference(shape, q, length - 1, k, v, 0, scale, 0)
    kept_k, kept_v = stored(shape, k), stored(shape, v)
    found, _, _, _ = reference(shape, q, length - 1, kept_k.values(), kept_v.values(), 0, scale, 0)
    moved = np.abs(kept_k.values() - k).max() * scale * np.abs(q).sum(axis=1, keepdims=True)
    bound = np.expm1(2 * moved) * np.abs(v).max() + np.abs(kept_v.values() - v).max()
    assert (np.abs(found - exact) <= bound).all()
    assert np.abs(found - exact).max() < 0.02


def test_index_arrays_may_be_parts_of_one_buffer() -> None:
    """TVM's cache sends all index arrays in one copy: the kernels get views with an offset."""
    shape = SHAPES[0]
    decode = compile_together({"decode": CacheKernel(shape, "decode").build()})["decode"]
    call = decode_call(shape, False, [37, 5])
    whole = tensors(call.args)
    for index in (2, 3, 4, 5, 6):
        part = call.args[index]
        assert isinstance(part, np.ndarray)
        padded = tvm.runtime.tensor(np.concatenate([np.full(16, 10**9, np.int32), part]))
        whole[index] = padded._create_view(part.shape, "int32", relative_byte_offset=64)
    decode(*whole)
    for index, (expected, bound) in call.expected.items():
        assert_within(call.output(index, whole[index]), expected, bound)


def test_sequences_of_the_cases_have_unused_slots() -> None:
    """The cases only find reads past the end if there is something to read: NaN, or an old key."""
    shape = SHAPES[0]
    batch = sequences(shape, [5] * 6, np.random.default_rng(0))
    used = batch.pages[batch.values].reshape(6, 4, 2, -1).view(np.float32)
    keys, values = used[:, :, 0].reshape(6, 4, 24, PAGE), used[:, :, 1].reshape(6, 4, PAGE, 24)
    assert not np.isnan(keys[..., :5]).any() and not np.isnan(values[:, :, :5]).any()
    stale = ~np.isnan(keys[..., 5:]).any(axis=(1, 2, 3))
    assert stale.any() and not stale.all()
    assert np.isnan(values[~stale][:, :, 5:]).all() and np.isnan(keys[~stale][..., 5:]).all()
