"""Sampling functions against numpy: the draw is the inverse of the distribution function, the rest is exact."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.kernels.cases.cpu.sampling import Settings, sample_args, some_logits, some_settings, survivors
from tests.kernels.cases.gpu.sampling import CASES
from tests.kernels.harness import Array, Call, assert_outputs, assert_within, compile_together, tensors
from tir_schedules.sampling import DRAWS

VOCABS = (1003, 16, 5, 1)
LARGE = 151936
OFF = Settings(1.0, 0, 1.0, 0.0)
# Draws by share are not among them: where top-k has no effect, tokens are drawn by id here, best first on GPUs.
SHARED = [name for name in CASES if not name.startswith(("draws", "rows"))]


@cache
def functions(vocab: int) -> Mapping[str, Any]:
    from tir_schedules.cpu.sampling import forbid_inplace, sampling_functions

    forbidding = CASES["ids without tokens"]
    more = {"forbid_inplace": forbid_inplace(vocab, forbidding.ranges)} if vocab == forbidding.vocab else {}
    others = set() if vocab == VOCABS[0] else set(DRAWS.values())  # whose steps are those of `sample`
    made = {name: func for name, func in sampling_functions(vocab).items() if name not in others}
    return compile_together({**made, **more})


def drawn(logits: Array, settings: list[Settings], draws: Array) -> Array:
    """The tokens that `sample` takes, and a check that it leaves the logits alone."""
    args = tensors(sample_args(logits, settings, draws))
    functions(logits.shape[1])["sample"](*args)
    np.testing.assert_array_equal(args[0].numpy()[:, 0], logits)
    tokens: Array = args[-1].numpy()
    return tokens


@pytest.mark.parametrize("name", SHARED)
def test_cases_of_every_device(name: str) -> None:
    case = CASES[name]
    for call in case.calls():
        values = tensors(call.args)
        functions(case.vocab)[call.function](*values)
        call.check([value.numpy() for value in values])


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_draw_inverts_the_distribution_function(vocab: int) -> None:
    """The middle of every survivor's share gives that survivor, in one of the two orders that `sample` may use."""
    rng = np.random.default_rng(vocab)
    for trial in range(24):
        logits = some_logits(rng, 1, vocab)
        settings = some_settings(rng, vocab)
        kept, weight = survivors(logits[0], settings)
        orders = [np.arange(len(kept)), np.argsort(kept)]
        hits = []
        for order in orders:
            share = weight[order] / weight.sum()
            middle = np.cumsum(share) - share / 2
            wide = np.flatnonzero(share > 1e-5)
            wide = wide[:: max(1, len(wide) // 40)]
            tokens = drawn(np.repeat(logits, len(wide), axis=0), [settings] * len(wide), middle[wide])
            hits.append(np.array_equal(tokens, kept[order][wide]))
        assert any(hits), (trial, settings)
        assert hits[0] or settings.top_p == 1, "after top-p, best first"


def test_a_sum_that_equals_top_p_is_enough() -> None:
    """Shares of 1/2, 1/4, 1/4: the best token alone reaches 0.5 (transformers: cumulative <= 1 - top_p is removed)."""
    logits = np.full((3, 16), -np.inf, np.float32)
    logits[:, [9, 2, 11]] = np.log([0.5, 0.25, 0.25])
    draws = np.array([0.0, 0.6, 0.99])
    even = np.where(np.isfinite(logits), 0, -np.inf).astype(np.float32)[:, :11]  # ids 2 and 9, 1/2 each
    np.testing.assert_array_equal(drawn(even, [Settings(1.0, 0, 0.5, 0.0)] * 3, draws), [2, 2, 2])
    np.testing.assert_array_equal(drawn(logits, [Settings(1.0, 0, 0.49, 0.0)] * 3, draws), [9, 9, 9])
    np.testing.assert_array_equal(drawn(logits, [Settings(1.0, 0, 0.51, 0.0)] * 3, draws), [9, 9, 2])


def test_survivors_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch", reason="the warpers are torch code")
    process = pytest.importorskip("transformers.generation.logits_process", reason="the reference's reference")
    rng = np.random.default_rng(5)
    for _ in range(60):
        logits, s = some_logits(rng, 1, 211), some_settings(rng, 211)
        warpers = [process.TemperatureLogitsWarper(s.temperature)]
        warpers += [process.TopKLogitsWarper(s.top_k)] if s.top_k else []
        warpers += [process.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
        warpers += [process.MinPLogitsWarper(s.min_p)] if s.min_p else []
        scores = torch.from_numpy(logits.astype(np.float64))
        for warper in warpers:
            scores = warper(None, scores)
        left = np.flatnonzero(np.isfinite(scores[0].numpy()))
        assert set(left.tolist()) == set(survivors(logits[0], s)[0].tolist()), s


def test_a_token_comes_with_its_probability() -> None:
    """Among those that could be drawn; of the best token at temperature 0 among all, at temperature 1."""
    rng = np.random.default_rng(11)
    logits = some_logits(rng, 40, 1003)
    logits[7, 3] = np.nan
    settings = [some_settings(rng, 1003) if i % 4 else Settings(0.0, 0, 1.0, 0.0) for i in range(40)]
    args = tensors((*sample_args(logits, settings, rng.random(40)), np.full(40, -7, np.float32)))
    functions(1003)["sample_with_confidence"](*args)
    tokens, found = (one.numpy() for one in args[-2:])
    np.testing.assert_array_equal(tokens, drawn(logits, settings, args[-3].numpy()))
    assert (tokens[7], found[7]) == (-1, 0)
    for row, one, token, confidence in zip(logits, settings, tokens, found):
        if token >= 0:
            kept, weight = survivors(row, one if one.temperature else Settings(1.0, 0, 1.0, 0.0))
            expected = weight[kept == token][0] / weight.sum()
            np.testing.assert_allclose(confidence, expected, rtol=1e-4)


def test_a_token_comes_with_how_sure_the_model_is() -> None:
    """Its probability, that at temperature 1, the margin to the second token, and the negative entropy."""
    rng = np.random.default_rng(12)
    logits = some_logits(rng, 40, 1003)
    logits[7, 3] = np.nan
    settings = [some_settings(rng, 1003) if i % 5 else Settings(0.0, 0, 1.0, 0.0) for i in range(40)]
    measures = np.arange(40, dtype=np.int32) // 2 % 4
    *given, token = sample_args(logits, settings, rng.random(40))
    args = tensors((*given, measures, token, np.full(40, -7, np.float32)))
    functions(1003)["sample_with_measure"](*args)
    tokens, found = (one.numpy() for one in args[-2:])
    np.testing.assert_array_equal(tokens, drawn(logits, settings, given[-1]))
    assert (tokens[7], found[7]) == (-1, 0)
    for row, one, token, measure, value in zip(logits, settings, tokens, measures, found):
        if token >= 0:
            every = Settings(1.0, 0, 1.0, 0.0)
            kept, weight = survivors(row, every if measure == 1 or not one.temperature else one)
            shares = weight / weight.sum()
            second, first = np.sort([0.0, *shares])[-2:]
            with np.errstate(divide="ignore", invalid="ignore"):
                entropy = np.nansum(shares * np.log(shares))
            expected = (shares[kept == token][0], shares[kept == token][0], first - second, entropy)[measure]
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_rows_have_their_own_settings() -> None:
    rng = np.random.default_rng(3)
    logits = some_logits(rng, 64, 1003)
    settings = [some_settings(rng, 1003) if i % 5 else Settings(0.0, 0, 1.0, 0.0) for i in range(64)]
    draws = rng.random(64)
    together = drawn(logits, settings, draws)
    alone = [drawn(logits[i : i + 1], settings[i : i + 1], draws[i : i + 1])[0] for i in range(64)]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("settings", [OFF, Settings(1.0, 7, 0.9, 0.5), Settings(0.0, 0, 1.0, 0.0)])
@pytest.mark.parametrize("value", [0.0, -1e-40, 1e30, -3.4e38])
def test_equal_logits(value: float, settings: Settings) -> None:
    """All tokens alike: ties go to lower ids, and the shares are equal."""
    draws = (np.arange(5) + 0.5) / 5
    tokens = drawn(np.full((5, 1003), value, np.float32), [settings] * 5, draws)
    count = 1003 if settings == OFF else (1 if settings.temperature == 0 else 7)
    if count == 7:
        # 6 of 7 equal shares are the first sum of at least 0.9? 6/7 < 0.9 <= 7/7.
        np.testing.assert_array_equal(tokens, np.floor(draws * 7))
    else:
        assert np.abs(tokens - np.floor(draws * count)).max() <= 1e-3 * count


@pytest.mark.parametrize(
    ("spread", "top_p"),
    [
        (0.01, 1.0),
        (3.0, 0.95),
        pytest.param(3.0, 1.0, marks=pytest.mark.everything),
        pytest.param(0.01, 0.95, marks=pytest.mark.everything),
    ],
)
def test_a_large_vocabulary_keeps_its_distribution(spread: float, top_p: float) -> None:
    """The distribution function at the drawn token is the draw, to 2e-6, in spite of 151936 float32 terms.

    Where the best come first, exp's error of 4e-7 may swap a token with a few that weigh the same.
    """
    slack = 5e-5 if top_p < 1 and spread < 1 else 2e-6
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((1, LARGE)) * spread).astype(np.float32)
    settings = Settings(1.0, 0, top_p, 0.0)
    kept, weight = survivors(logits[0], settings)
    order = np.arange(len(kept)) if top_p < 1 else np.argsort(kept)
    upper = np.zeros(LARGE)
    upper[kept[order]] = np.cumsum(weight[order]) / weight.sum()
    share = np.zeros(LARGE)
    share[kept] = weight / weight.sum()
    draws = np.linspace(0, 1 - 2.0**-24, 21)
    tokens = drawn(np.repeat(logits, 21, axis=0), [settings] * 21, draws)
    assert (draws <= upper[tokens] + slack).all()
    assert (draws >= upper[tokens] - share[tokens] - slack).all()


def test_logit_bias_adds_up() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    row, token = np.array([0, 2, 2, 2], np.int32), np.array([15, 3, 3, 0], np.int32)
    bias = np.array([1.0, 2.0, -0.5, -100.0], np.float32)
    expected = logits.astype(np.float64)
    np.add.at(expected, (row, token), bias)
    call = Call((logits.copy(), row, token, bias), {0: (expected, 1e-5)})
    assert_outputs(functions(16)["apply_logit_bias_inplace"], call)


def test_penalties_in_order() -> None:
    """Presence and frequency first, then repetition, which divides what is positive and multiplies the rest."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((4, 16)).astype(np.float32)
    seq, of = np.array([3, 1], np.int32), np.array([0, 0, 1, 1, 1], np.int32)
    token, count = np.array([2, 9, 0, 15, 9], np.int32), np.array([1, 4, 2, 1, 3], np.int32)
    penalties = np.array([[0.5, 0.25, 1.3], [0.0, -0.5, 2.0]], np.float32)
    expected = logits.astype(np.float64)
    for entry, t, n in zip(of, token, count):
        presence, frequency, repetition = (float(value) for value in penalties[entry])
        value = expected[seq[entry], t] - presence - n * frequency
        expected[seq[entry], t] = value * repetition if value < 0 else value / repetition
    call = Call((logits.copy(), seq, of, token, count, penalties), {0: (expected, 2e-6)})
    assert_outputs(functions(16)["apply_penalty_inplace"], call)


@pytest.mark.parametrize("vocab", VOCABS)
def test_bitmask(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    allowed = rng.random((3, vocab)) < 0.5
    words = -(-vocab // 32)
    bits = np.zeros((3, words * 32), np.uint64)
    bits[:, :vocab] = allowed
    mask = (bits.reshape(3, words, 32) << np.arange(32, dtype=np.uint64)).sum(axis=2).astype(np.uint32).view(np.int32)
    seq = np.array([2, 0], np.int32)
    expected = logits.astype(np.float64)
    for row in seq:
        expected[row, ~allowed[row]] = np.float32(-3.4e38)
    call = Call((logits.copy(), seq, mask), {0: (expected, 0.0)})
    assert_outputs(functions(vocab)["apply_bitmask_inplace"], call)


def test_shares_add_up_to_one() -> None:
    """As many equally spaced draws as a token's share says give it, for a vocabulary that is not whole vectors."""
    logits = np.array([[0.3, -1.0, 2.0, 0.0, 1.1]], np.float32)
    kept, weight = survivors(logits[0], OFF)
    tokens = drawn(np.repeat(logits, 10000, axis=0), [OFF] * 10000, (np.arange(10000) + 0.5) / 10000)
    counts = np.bincount(tokens, minlength=5)[kept]
    assert_within(counts / 10000, weight / weight.sum(), 1.1e-4)
