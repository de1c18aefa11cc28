"""Tokens drawn on a Vulkan device: the draw inverts the distribution function, penalties and bias are numpy's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, tirx

from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.spirv import build
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.kernels.harness import Array
from tests.kernels.sampling_cases import Settings, edges, sample_args, some_logits, some_settings, survivors
from tir_schedules.gpu.sampling import sampling_functions

pytestmark = pytest.mark.usefixtures("gpu")

OFF, GREEDY = Settings(1.0, 0, 1.0, 0.0), Settings(0.0, 3, 0.5, 0.1)
VOCABS = (5003, 16, 1)  # three slices of the vocabulary, one, and the least
LARGE = 151936


@cache
def functions(vocab: int) -> Mapping[str, Any]:
    """The functions that the engine calls."""
    build.register()
    target = load_target("vulkan")
    made = sampling_functions(vocab)
    names = ("sample", "apply_penalty_inplace", "apply_logit_bias_inplace")
    used = {name: made[name].with_attr("global_symbol", name) for name in names}
    with own_barriers():
        return tirx.build(IRModule(used), target=tvm_target(target, compiled_variants(target)[0]))


def on_gpu(array: Array) -> Any:
    return tvm.runtime.tensor(array, tvm.device("vulkan", 0))


def drawn(logits: Array, settings: list[Settings], draws: Array) -> Array:
    """The tokens that `sample` takes, and a check that it leaves the logits alone."""
    args = [on_gpu(array) for array in sample_args(logits, settings, draws)]
    functions(logits.shape[1])["sample"](*args)
    np.testing.assert_array_equal(args[0].numpy()[:, 0], logits)
    tokens: Array = args[-1].numpy()
    return tokens


def ordered(kept: Array, settings: Settings) -> Array:
    """The order in which tokens are drawn: the best first, or by id."""
    return np.arange(len(kept)) if settings.top_p < 1 or settings.top_k else np.argsort(kept)


def check_middles(logits: Array, settings: Settings, most: int) -> None:
    """The middle of a survivor's share gives that survivor."""
    kept, weight = survivors(logits[0], settings)
    order = ordered(kept, settings)
    share = weight[order] / weight.sum()
    middle = np.cumsum(share) - share / 2
    wide = np.flatnonzero(share > 1e-5)
    wide = wide[:: max(1, len(wide) // most)]
    tokens = drawn(np.repeat(logits, len(wide), axis=0), [settings] * len(wide), middle[wide])
    np.testing.assert_array_equal(tokens, kept[order][wide], str(settings))


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_draw_inverts_the_distribution_function(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(16):
        check_middles(some_logits(rng, 1, vocab), some_settings(rng, vocab), 20)


def test_a_large_vocabulary() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((1, LARGE)) * 4).astype(np.float32)
    for settings in (Settings(0.7, 0, 0.95, 0.0), Settings(0.7, 40, 0.95, 0.05), Settings(0.7, 0, 1.0, 0.0)):
        check_middles(logits, settings, 6)
    assert drawn(logits, [GREEDY], np.zeros(1)) == logits.argmax()


def test_survivors_are_exact_at_the_edge() -> None:
    """Draws over the whole interval reach the last survivor and nothing after it; the cut lies between two sums."""
    for logits, settings, expected in edges(1003, 12):
        draws = np.linspace(0, 1 - 2.0**-24, 40)
        tokens = drawn(np.repeat(logits, 40, axis=0), [settings] * 40, draws)
        assert set(tokens.tolist()) <= set(expected.tolist()), settings
        assert (tokens[0], tokens[-1]) == (expected[0], expected[-1]), settings


def test_equal_weights_go_by_id() -> None:
    """Ties at the edge of top-k and of top-p: the lower ids are in, whichever slice they are in."""
    vocab = 5003
    logits = np.full((1, vocab), -1.0, np.float32)
    ids = [7, 31, 2049, 2500, 4099]
    logits[0, ids] = 3.0
    draws = (np.arange(10) + 0.5) / 10
    for settings, left in ((Settings(1.0, 3, 1.0, 0.0), 3), (Settings(0.2, 0, 0.7, 0.0), 4), (Settings(0.2, 4, 0.5, 0.0), 2)):
        tokens = drawn(np.repeat(logits, 10, axis=0), [settings] * 10, draws)
        np.testing.assert_array_equal(tokens, [ids[int(draw * left)] for draw in draws], str(settings))


def test_rows_have_their_own_settings() -> None:
    rng = np.random.default_rng(3)
    logits = some_logits(rng, 24, 5003)
    settings = [some_settings(rng, 5003) if i % 5 else GREEDY for i in range(24)]
    draws = rng.random(24)
    alone = [drawn(logits[i : i + 1], settings[i : i + 1], draws[i : i + 1])[0] for i in range(24)]
    np.testing.assert_array_equal(drawn(logits, settings, draws), alone)


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_first_of_the_largest(vocab: int) -> None:
    logits = np.random.default_rng(0).integers(-3, 4, (40, vocab)).astype(np.float32)
    tokens = drawn(logits, [GREEDY] * 40, np.full(40, 0.999))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))


@pytest.mark.parametrize("masked", [-3.4e38, -np.inf, -200.0])
@pytest.mark.parametrize("settings", [OFF, Settings(1.0, 500, 1.0, 0.0), Settings(1.7, 0, 0.99999, 0.0), GREEDY])
def test_a_masked_token_is_never_drawn(masked: float, settings: Settings) -> None:
    logits = np.full((1, 5003), masked, np.float32)
    allowed = [700, 5 + 4600, 31]
    logits[0, allowed] = [1.0, 2.0, 0.5]
    draws = np.array([0.0, 1e-30, 2.0**-24, 0.3, 0.9, 1 - 2.0**-24])
    assert set(drawn(np.repeat(logits, 6, axis=0), [settings] * 6, draws).tolist()) <= set(allowed)


def test_logits_that_are_no_numbers_give_a_token() -> None:
    logits = np.full((3, 5003), np.nan, np.float32)
    logits[1, 77], logits[2] = np.inf, -np.inf
    for settings in (OFF, GREEDY, Settings(0.7, 40, 0.95, 0.05)):
        tokens = drawn_blindly(logits, [settings] * 3, np.full(3, 0.5))
        assert ((tokens >= 0) & (tokens < 5003)).all()


def drawn_blindly(logits: Array, settings: list[Settings], draws: Array) -> Array:
    args = [on_gpu(array) for array in sample_args(logits, settings, draws)]
    functions(logits.shape[1])["sample"](*args)
    tokens: Array = args[-1].numpy()
    return tokens


def test_penalties_and_bias() -> None:
    vocab = 5003
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, vocab)).astype(np.float32)
    tokens, counts = np.array([5, 1002, 9, 4999], np.int32), np.array([1, 3, 2, 1], np.int32)
    penalty = np.array([[0.5, 0.25, 1.2]], np.float32)
    expected = logits.copy()
    expected[0, tokens] -= 0.5 + 0.25 * counts
    expected[0, tokens] *= np.where(expected[0, tokens] < 0, np.float32(1.2), 1 / np.float32(1.2))
    expected[0, [3, 5]] += [1.5, -100.0]
    found, zero = on_gpu(logits), np.zeros(4, np.int32)
    functions(vocab)["apply_penalty_inplace"](found, *map(on_gpu, (zero[:1], zero, tokens, counts, penalty)))
    bias = (zero[:2], np.array([3, 5], np.int32), np.array([1.5, -100.0], np.float32))
    functions(vocab)["apply_logit_bias_inplace"](found, *map(on_gpu, bias))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
