"""Upkeep of the KV cache's pages: append, split, merge, copy, compact, read back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm

from tir_schedules.cpu.attention import PAGE, AttentionShape

from .attention_cases import LAYERS, SHAPES, CacheKernel, decode_call, sequences, write_token
from .harness import Array, Call, assert_outputs, assert_within, compile_together, tensors, unwritten

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
    return rng.standard_normal(size).astype(shape.dtype), rng.standard_normal(size).astype(shape.dtype)


def slots(rng: np.random.Generator, pages: int, n: int) -> Array:
    return rng.permutation(pages * PAGE)[:n].astype(np.int32)


def pages_of(shape: AttentionShape, where: Array, k: Array, v: Array, pages: int) -> Array:
    """Pages of NaN with tokens at slots `where`."""
    array = np.full((pages, 2, shape.num_kv_heads, PAGE, shape.head_dim), np.nan, shape.dtype)
    for slot, key, value in zip(where, k, v):
        if slot >= 0:
            write_token(array, int(slot) // PAGE, int(slot) % PAGE, key, value)
    return array


def exactly(array: Array) -> tuple[Array, float]:
    return array.astype(np.float64), 0.0


def test_append_writes_its_slots_and_no_other(shape: AttentionShape) -> None:
    k, v = tokens(shape, 21)
    where = slots(np.random.default_rng(1), 4, 21)
    where[[3, 20]] = -1
    empty = pages_of(shape, where[:0], k, v, 4)
    call = Call((empty, k, v, where), {0: exactly(pages_of(shape, where, k, v, 4))})
    assert_outputs(functions(shape)["append"], call)


def test_split_takes_q_k_v_in_order(shape: AttentionShape) -> None:
    h, kv, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = np.random.default_rng(0).standard_normal((7, h + 2 * kv, dim)).astype(shape.dtype)
    outputs = [unwritten((7, count, dim), shape.dtype) for count in (h, kv, kv)]
    parts = np.split(qkv, [h, h + kv], axis=1)
    args = (qkv, np.arange(7, dtype=np.int32), *outputs, 0)
    assert_outputs(functions(shape)["split"], Call(args, {2 + i: exactly(part) for i, part in enumerate(parts)}))


def test_read_back_gives_one_layer(shape: AttentionShape) -> None:
    k, v = tokens(shape, 9)
    where = slots(np.random.default_rng(2), 3, 9)
    out = [unwritten((LAYERS, *k.shape), shape.dtype) for _ in range(2)]
    expected = {}
    for index, array in ((2, k), (3, v)):
        both = out[0].astype(np.float64)
        both[1] = array
        expected[index] = (both, 0.0)
    args = (pages_of(shape, where, k, v, 3), where, *out, 1)
    assert_outputs(functions(shape)["read_back"], Call(args, expected))


@pytest.mark.parametrize("length", [1, 7, 16])
def test_copy_page_copies_the_first_tokens(shape: AttentionShape, length: int) -> None:
    k, v = tokens(shape, 2 * PAGE)
    where = np.arange(2 * PAGE, dtype=np.int32)
    before = pages_of(shape, where, k, v, 3)
    args = tensors([before, 1, 2, length])
    functions(shape)["copy_page"](*args)
    found = args[0].numpy()
    np.testing.assert_array_equal(found[:2], before[:2])
    kv, dim = shape.num_kv_heads, shape.head_dim
    np.testing.assert_array_equal(
        found[2, 0].reshape(kv, dim, PAGE)[:, :, :length], before[1, 0].reshape(kv, dim, PAGE)[:, :, :length]
    )
    np.testing.assert_array_equal(found[2, 1, :, :length], before[1, 1, :, :length])


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
    call = Call((before, indptr, pairs, 3), {0: exactly(after)})
    assert_outputs(functions(shape)["compact"], call)


def test_merge_weighs_by_the_sums(shape: AttentionShape) -> None:
    """Rows with equal sums, with far ones, and with one side or both that saw no key."""
    rng = np.random.default_rng(0)
    size = (8, shape.num_heads, shape.head_dim)
    v, other = (rng.standard_normal(size).astype(shape.dtype) for _ in range(2))
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
    largest = np.maximum(np.abs(v), np.abs(other)).astype(np.float64)
    bound = 1e-5 * largest + (2.0**-11 * np.abs(expected) + 2.0**-24 if shape.dtype == "float16" else 0.0)
    sums = top + np.log2(a + b)
    call = Call((v.copy(), s.copy(), other, s_other), {0: (expected, bound), 1: (sums, 2e-7 * np.abs(sums) + 1e-6)})
    assert_outputs(functions(shape)["merge"], call)


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
        assert_within(whole[index].numpy().astype(np.float64), expected, bound)


def test_sequences_of_the_cases_have_unused_slots() -> None:
    """The cases only find reads past the end if there is something to read: NaN, or an old key."""
    batch = sequences(SHAPES[0], [5] * 6, np.random.default_rng(0))
    used = batch.pages[batch.values]
    keys, values = used[:, 0].reshape(6, 4, 24, PAGE), used[:, 1]
    assert not np.isnan(keys[..., :5]).any() and not np.isnan(values[:, :, :5]).any()
    stale = ~np.isnan(keys[..., 5:]).any(axis=(1, 2, 3))
    assert stale.any() and not stale.all()
    assert np.isnan(values[~stale][:, :, 5:]).all() and np.isnan(keys[~stale][..., 5:]).all()
