"""Attention over pages gives a row the same bits whatever rows there are beside it, and however prompts are cut."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.cases.cpu.attention import reference, stored
from tests.kernels.cases.cpu.page_attention import SHAPES as CASE_SHAPES
from tests.kernels.cases.cpu.page_attention import (
    PageKernel,
    Part,
    Sequence_,
    attend_args,
    attend_call,
    batch,
    sequence,
    store_call,
)
from tests.kernels.harness import (
    KINDS,
    Array,
    adversarial,
    assert_outputs,
    assert_within,
    compile_together,
    tensors,
    unwritten,
)
from tir_schedules.cpu.attention import PAGE, AttentionShape, page_functions
from tir_schedules.step_layout import LAST_KEY

SHAPES = (
    (AttentionShape(8, 2, 64, "float16"), 0),
    (AttentionShape(14, 2, 64, "q8"), 70),
    (AttentionShape(20, 1, 72, "float16", value_dim=64, latent=True), 0),
    (AttentionShape(3, 3, 80, "float32", softcap=20.0), 0),
    (AttentionShape(5, 1, 6, "float32"), 20),
    (AttentionShape(4, 2, 32, "q4"), 70),
)


def kernels(role: str) -> list[Any]:
    """A function for every shape; those of the first two are in `make test`."""
    made = [PageKernel(shape, role, window) for shape, window in SHAPES]
    return [pytest.param(k, id=k.symbol, marks=() if i < 2 else pytest.mark.full) for i, k in enumerate(made)]


FEW, MANY = kernels("attend_few"), kernels("attend_many")


@functools.cache
def function(kernel: PageKernel) -> Any:
    return compile_together({kernel.symbol: kernel.build()})[kernel.symbol]


def attend(kernel: PageKernel, parts: Sequence[Part], seed: int = 0) -> list[Array]:
    """What the rows of each part get, in a step with pages of its own."""
    values = tensors(attend_args(kernel.shape, batch(kernel, parts, seed)))
    function(kernel)(*values)
    ends = np.cumsum([part.end - part.begin for part in parts])
    return np.split(values[-1].numpy(), ends[:-1])


def sequences(kernel: PageKernel, *lengths: int) -> list[Sequence_]:
    return [sequence(kernel.shape, length, seed) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("kernel", FEW)
def test_a_row_of_few_is_the_same_alone_and_in_a_batch(kernel: PageKernel) -> None:
    lengths = [1 + 37 * i % 700 for i in range(64)]
    parts = [Part(of, length - 1, length) for of, length in zip(sequences(kernel, *lengths), lengths)]
    together = attend(kernel, parts)
    for i in (0, 5, 31, 63):
        np.testing.assert_array_equal(attend(kernel, [parts[i]], seed=i)[0], together[i])
    pair = attend(kernel, [parts[63], parts[5]])
    np.testing.assert_array_equal(pair[1], together[5])


@pytest.mark.parametrize("kernel", FEW)
def test_several_rows_of_a_sequence_are_as_one_after_the_other(kernel: PageKernel) -> None:
    """As drafts are verified: later rows' keys are in the pages already, and no row before sees them."""
    one, other = sequences(kernel, 320, 70)
    for begin, end in ((0, 3), (14, 18), (62, 67), (254, 259), (312, 320)):
        together = attend(kernel, [Part(other, 60, 61), Part(one, begin, end)])[1]
        for i in range(begin, end):
            (alone,) = attend(kernel, [Part(one, i, i + 1)], seed=i)
            np.testing.assert_array_equal(alone[0], together[i - begin])


CUTS = ((1,), (15,), (16,), (17,), (63,), (64,), (65,), (3, 7, 16, 40, 41, 100, 163))


@pytest.mark.parametrize("kernel", MANY)
def test_a_prompt_is_the_same_in_any_chunks(kernel: PageKernel) -> None:
    (prompt,) = sequences(kernel, 210)
    (whole,) = attend(kernel, [Part(prompt, 0, 210)])
    for cut in CUTS:
        borders = [0, *(cut if len(cut) > 1 else range(cut[0], 210, cut[0])), 210]
        if cut == (1,):
            borders = [0, 1, 2, 100, 101, 209, 210]
        chunks = [
            attend(kernel, [Part(prompt, begin, end)], seed=end)[0] for begin, end in zip(borders[:-1], borders[1:])
        ]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize("kernel", MANY)
def test_a_prompt_is_the_same_beside_others(kernel: PageKernel) -> None:
    prompts = sequences(kernel, 5, 210, 64, 1, 130)
    parts = [Part(of, begin, len(of.q)) for of, begin in zip(prompts, (0, 37, 63, 0, 129))]
    together = attend(kernel, parts)
    for i, part in enumerate(parts):
        np.testing.assert_array_equal(attend(kernel, [part], seed=i)[0], together[i])


PICTURES = ((20, 84), (100, 130))  # the first and the end of their rows


@pytest.mark.parametrize("kernel", MANY[:2])
def test_rows_of_a_picture_see_each_other(kernel: PageKernel) -> None:
    """Up to the step's last keys, in any chunks that cut none; other rows have the bits of a prompt without."""
    shape, name = replace(kernel.shape, page_group=int(kernel.window > 0)), f"{kernel.symbol}_ahead"
    role = page_functions(shape, kernel.scale, kernel.window, ahead=True)["attend_many"]
    ahead = compile_together({name: role})[name]
    (prompt,) = sequences(kernel, 150)
    (plain,) = attend(kernel, [Part(prompt, 0, 150)])
    last = np.arange(150)
    for begin, end in PICTURES:
        last[begin:end] = end - 1

    def seeing(*parts: tuple[int, int]) -> Array:
        given = batch(kernel, [Part(prompt, begin, end) for begin, end in parts])
        integers = np.concatenate([given.integers, *(last[begin:end] for begin, end in parts)]).astype(np.int32)
        integers[LAST_KEY] = len(given.integers)
        values = tensors(attend_args(kernel.shape, dataclasses.replace(given, integers=integers)))
        ahead(*values)
        return values[-1].numpy()

    found = seeing((0, 150))
    k, v = prompt.kept_k.values(), prompt.kept_v.values()
    for i in range(150):
        seen = slice(max(0, i + 1 - kernel.window) if kernel.window else 0, last[i] + 1)
        assert_within(found[i], *reference(kernel.shape, prompt.q[i], k[seen], v[seen], kernel.scale), f"row {i}")
    np.testing.assert_array_equal(found[:20], plain[:20])
    np.testing.assert_array_equal(found[131:], plain[131:])
    np.testing.assert_array_equal(seeing((0, 20), (20, 84), (84, 100)), found[:100])
    np.testing.assert_array_equal(seeing((50, 84), (110, 150)), np.concatenate([found[50:84], found[110:150]]))


@pytest.mark.parametrize("of_v", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("kernel", [*FEW, *MANY])
def test_nan_shows_in_every_row_that_sees_it_and_in_no_other_sequence(kernel: PageKernel, of_v: int) -> None:
    shape, at = kernel.shape, 21
    damaged, sound = sequences(kernel, 40, 40)
    kept = (damaged.kept_k, damaged.kept_v)[of_v and not shape.latent]
    (kept.elements if kept.scales is None else kept.scales)[at, -1, -1] = np.nan
    found, other = attend(kernel, [Part(damaged, 10, 40), Part(sound, 10, 40)])
    last_heads = np.isnan(found[:, -shape.group :]).any(axis=2)
    last = at + kernel.window if kernel.window else 40
    assert last_heads[at - 10 : last - 10].all() and not np.isnan(found[:, : -shape.group]).any()
    assert not np.isnan(other).any()
    if not of_v and not shape.latent:  # a key that a query does not see is not in its scores
        assert not last_heads[: at - 10].any()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_steps_at_random_are_numpy(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, group, dim = draw.randint(1, 3), draw.randint(1, 8), draw.choice([2, 6, 24, 40, 64, 96, 128])
    dtypes = ["float32", "float16", "q8", *(["q4"] if dim % 16 == 0 else [])]
    dtype, softcap = draw.choice(dtypes), draw.choice([0.0, 20.0])
    shape = AttentionShape(group * kv_heads, kv_heads, dim, dtype, softcap)
    window = draw.choice([0, draw.randint(1, 70), draw.randint(1, 300)])
    for role, call in (("attend_few", attend_call), ("attend_many", attend_call), ("store_pages", store_call)):
        for _ in range(4):
            begins = [
                draw.choice([0, draw.randint(0, 350), 16 * draw.randint(0, 20)]) for _ in range(draw.randint(1, 6))
            ]
            spans = [(begin, begin + draw.choice([1, draw.randint(1, 8), draw.randint(1, 100)])) for begin in begins]
            kernel = PageKernel(shape, role, window)
            assert_outputs(function(kernel), call(kernel, spans))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e3])
def test_error_of_codes_is_as_stated(kind: str, size: float) -> None:
    """AttentionShape's bounds, per group of dimensions: an outlier costs its own group and no other."""
    bounds = {"q8": (0.004, 4e-6, 8e6), "q4": (0.126, 3e-7, 5e5)}
    for shape in (shape for shape in CASE_SHAPES if shape.dtype in bounds):
        relative, least, most = bounds[shape.dtype]
        x = adversarial(kind, (50, shape.num_kv_heads, shape.head_dim), np.random.default_rng(5), size)
        groups = (*x.shape[:-1], shape.scale_groups, -1)
        error = np.abs(stored(shape, x).values() - x).reshape(groups).max(axis=-1)
        largest = np.abs(x).reshape(groups).max(axis=-1)
        assert ((error <= relative * largest + least) | (largest > most)).all()


@pytest.mark.parametrize("outliers", [1.0, 30.0])
def test_int8_attention_is_near_that_of_exact_keys(outliers: float) -> None:
    """Scores move by at most sum|q| times the error of K, the output by that relative to V and by the error of V."""
    shape, length = AttentionShape(14, 2, 64, "q8"), 300
    rng = np.random.default_rng(9)
    q = rng.standard_normal((shape.num_heads, shape.head_dim)).astype(np.float32)
    k, v = (rng.standard_normal((length, shape.num_kv_heads, shape.head_dim)).astype(np.float32) for _ in range(2))
    k[..., ::37] *= outliers
    scale = shape.head_dim**-0.5 / outliers
    kept_k, kept_v = stored(shape, k), stored(shape, v)
    exact, _ = reference(shape, q, k, v, scale)
    found, _ = reference(shape, q, kept_k.values(), kept_v.values(), scale)
    moved = np.abs(kept_k.values() - k).max() * scale * np.abs(q).sum(axis=1, keepdims=True)
    bound = np.expm1(2 * moved) * np.abs(v).max() + np.abs(kept_v.values() - v).max()
    assert (np.abs(found - exact) <= bound).all()
    assert np.abs(found - exact).max() < 0.02


def hadamard(shape: AttentionShape) -> Array:
    """The orthogonal matrix [D, D] that rotates heads: Sylvester's, in blocks."""
    one = functools.reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * (shape.rotated_dims.bit_length() - 1))
    return np.kron(np.eye(shape.head_dim // len(one)), one / np.sqrt(len(one)))


@pytest.mark.parametrize("dim", [16, pytest.param(80, marks=pytest.mark.full), 128])
def test_rotation_is_numpy(dim: int) -> None:
    shape = AttentionShape(3, 1, dim, "q4")
    kernel = function(PageKernel(shape, "rotate_qkv"))
    for rows in (1, 40):
        x = np.random.default_rng(rows).standard_normal((rows, 5, dim)).astype(np.float32)
        (found,), matrix = tensors((x,)), hadamard(shape)
        kernel(found)
        np.testing.assert_allclose(found.numpy(), x @ matrix, atol=2e-6)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-12)


def test_rotation_keeps_outliers_of_keys_from_hiding_other_dimensions() -> None:
    """One dimension of the keys is 20 times as large, as those of trained models are (KIVI, Liu et al. 2024)."""
    shape, length = AttentionShape(4, 2, 64, "q4"), 40
    kernels = {
        role: function(PageKernel(shape, role)) for role in ("rotate_qkv", "store_pages", "attend_few", "rotate_out")
    }
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((length, 8, 64)).astype(np.float32)
    qkv[:, 4:6, 5] *= 20
    given = batch(PageKernel(shape, "store_pages"), [Part(sequence(shape, length, 0), 0, length)], with_rows=False)

    def attended(rotated: bool) -> Array:
        rows, step, pages, out = tensors((qkv, given.integers, given.pages.copy(), unwritten((length, 4, 64))))
        if rotated:
            kernels["rotate_qkv"](rows)
        kernels["store_pages"](rows, step, pages)
        kernels["attend_few"](rows, step, pages, out)
        if rotated:
            kernels["rotate_out"](out)
        return out.numpy()

    exact = np.stack(
        [reference(shape, qkv[i, :4], qkv[: i + 1, 4:6], qkv[: i + 1, 6:], 0.125)[0] for i in range(length)]
    )
    plain, rotated = (np.sqrt(np.square(attended(r) - exact).mean()) for r in (False, True))
    assert rotated < plain / 2, (rotated, plain)


def test_pages_of_the_cases_have_unused_slots() -> None:
    """The cases only find reads past the end if there is something to read: NaN, or an old key."""
    kernel = PageKernel(AttentionShape(4, 4, 24, "float32"), "attend_few")
    given = batch(kernel, [Part(of, 4, 5) for of in sequences(kernel, *[5] * 6)])
    pages = given.pages[given.slots // PAGE].view(np.float32).reshape(6, 4, 2, -1)
    keys, values = pages[:, :, 0].reshape(6, 4, 24, PAGE), pages[:, :, 1].reshape(6, 4, PAGE, 24)
    assert not np.isnan(keys[..., :5]).any() and not np.isnan(values[:, :, :5]).any()
    stale = ~np.isnan(keys[..., 5:]).any(axis=(1, 2, 3))
    assert stale.any() and not stale.all()
    assert np.isnan(values[~stale][:, :, 5:]).all() and np.isnan(keys[~stale][..., 5:]).all()
