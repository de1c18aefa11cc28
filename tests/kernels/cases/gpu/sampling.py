"""Sampling of tokens: the draw inverts the distribution function; penalties and bias are numpy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from tests.kernels.cases.cpu.sampling import Settings, edges, sample_args, some_logits, some_settings, survivors
from tests.kernels.cases.gpu.case import Array, Call, Knobs, by_rules
from tir_schedules.gpu.sampling.mlc_contract import forbid_inplace, sampling_functions

OFF, GREEDY = Settings(1.0, 0, 1.0, 0.0), Settings(0.0, 3, 0.5, 0.1)
MEDIUM = 5003  # three slices of the vocabulary; 16 is one, 1 the least
LARGE = 151936
USED = ("sample", "apply_penalty_inplace", "apply_logit_bias_inplace")


@dataclass(frozen=True)
class Sampling:
    """The functions that the engine calls, for a vocabulary."""

    vocab: int
    make: Callable[[int], Iterator[Call]] = field(hash=False)

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        made = sampling_functions(self.vocab)
        return {name: by_rules(made[name], knobs) for name in USED}

    def calls(self) -> Sequence[Call]:
        return list(self.make(self.vocab))


@dataclass(frozen=True)
class Forbidding:
    """Three rows lose what stands for no token: one, some, and all from one on."""

    vocab: int = MEDIUM
    ranges: tuple[tuple[int, int], ...] = ((0, 1), (70, 141), (MEDIUM - 99, MEDIUM))

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"forbid_inplace": by_rules(forbid_inplace(self.vocab, self.ranges), knobs)}

    def calls(self) -> Sequence[Call]:
        logits = np.random.default_rng(4).standard_normal((3, 1, self.vocab)).astype(np.float32)
        expected = logits.copy()
        for begin, end in self.ranges:
            expected[:, :, begin:end] = np.float32(-3.4e38)
        return [Call((logits,), lambda found: np.testing.assert_array_equal(found[0], expected), "forbid_inplace")]


def _draw(logits: Array, settings: list[Settings], draws: Array, check: Callable[[Array], None]) -> Call:
    """A call of `sample`, a check of its tokens, and one that it leaves the logits alone."""

    def checked(found: list[Array]) -> None:
        np.testing.assert_array_equal(found[0][:, 0], logits)
        check(found[-1])

    return Call(sample_args(logits, settings, draws), checked, "sample")


def _exactly(logits: Array, settings: list[Settings], draws: Array, tokens: Array | list[int]) -> Call:
    return _draw(logits, settings, draws, lambda found: np.testing.assert_array_equal(found, tokens, str(settings[0])))


def _middles(logits: Array, settings: Settings, count: int) -> tuple[Array, Array]:
    """Draws in the middle of the shares of about `count` survivors, and those survivors."""
    kept, weight = survivors(logits, settings)
    # Tokens are drawn best first, or by id.
    order = np.arange(len(kept)) if settings.top_p < 1 or settings.top_k else np.argsort(kept)
    share = weight[order] / weight.sum()
    middle = np.cumsum(share) - share / 2
    wide = np.flatnonzero(share > 1e-5)
    wide = wide[:: max(1, len(wide) // count)]
    return middle[wide], kept[order][wide]


def _call_of_middles(logits: Array, settings: Settings, count: int) -> Call:
    draws, tokens = _middles(logits[0], settings, count)
    return _exactly(np.repeat(logits, len(draws), axis=0), [settings] * len(draws), draws, tokens)


def inverse(vocab: int) -> Iterator[Call]:
    """The middle of a survivor's share gives that survivor."""
    rng = np.random.default_rng(vocab)
    for _ in range(16):
        yield _call_of_middles(some_logits(rng, 1, vocab), some_settings(rng, vocab), 20)


def large(vocab: int) -> Iterator[Call]:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((1, vocab)) * 4).astype(np.float32)
    for settings in (Settings(0.7, 0, 0.95, 0.0), Settings(0.7, 40, 0.95, 0.05), Settings(0.7, 0, 1.0, 0.0)):
        yield _call_of_middles(logits, settings, 6)
    yield _exactly(logits, [GREEDY], np.zeros(1), [int(logits.argmax())])


def at_the_edge(vocab: int) -> Iterator[Call]:
    """Draws over the whole interval reach the last survivor and nothing after it; the cut lies between two sums."""
    for logits, settings, expected in edges(vocab, 12):

        def check(tokens: Array, expected: Array = expected, settings: Settings = settings) -> None:
            assert set(tokens.tolist()) <= set(expected.tolist()), settings
            assert (tokens[0], tokens[-1]) == (expected[0], expected[-1]), settings

        draws = np.linspace(0, 1 - 2.0**-24, 40)
        yield _draw(np.repeat(logits, 40, axis=0), [settings] * 40, draws, check)


def ties(vocab: int) -> Iterator[Call]:
    """Ties at the edge of top-k and of top-p: the lower ids are in, whichever slice they are in."""
    logits = np.full((1, vocab), -1.0, np.float32)
    ids = [7, 31, 2049, 2500, 4099]
    logits[0, ids] = 3.0
    draws = (np.arange(10) + 0.5) / 10
    for settings, left in (
        (Settings(1.0, 3, 1.0, 0.0), 3),
        (Settings(0.2, 0, 0.7, 0.0), 4),
        (Settings(0.2, 4, 0.5, 0.0), 2),
    ):
        tokens = [ids[int(draw * left)] for draw in draws]
        yield _exactly(np.repeat(logits, 10, axis=0), [settings] * 10, draws, tokens)


def rows(vocab: int) -> Iterator[Call]:
    """Each row has its own settings."""
    rng = np.random.default_rng(3)
    logits = some_logits(rng, 24, vocab)
    settings = [some_settings(rng, vocab) if i % 5 else GREEDY for i in range(24)]
    draws, tokens = np.zeros(24), np.zeros(24, np.int64)
    for i, one in enumerate(settings):
        if one == GREEDY:
            draws[i], tokens[i] = 0.999, logits[i].argmax()
            continue
        some_draws, some_tokens = _middles(logits[i], one, 20)
        which = int(rng.integers(len(some_draws)))
        draws[i], tokens[i] = some_draws[which], some_tokens[which]
    yield _exactly(logits, settings, draws, tokens)


def greedy(vocab: int) -> Iterator[Call]:
    """The first of the largest."""
    logits = np.random.default_rng(0).integers(-3, 4, (40, vocab)).astype(np.float32)
    yield _exactly(logits, [GREEDY] * 40, np.full(40, 0.999), logits.argmax(axis=1))


def masked(vocab: int) -> Iterator[Call]:
    """A masked token is never drawn."""
    allowed = [700, 4605, 31]
    draws = np.array([0.0, 1e-30, 2.0**-24, 0.3, 0.9, 1 - 2.0**-24])
    for value in (-3.4e38, -np.inf, -200.0):
        logits = np.full((6, vocab), value, np.float32)
        logits[:, allowed] = [1.0, 2.0, 0.5]
        for settings in (OFF, Settings(1.0, 500, 1.0, 0.0), Settings(1.7, 0, 0.99999, 0.0), GREEDY):

            def check(tokens: Array) -> None:
                assert set(tokens.tolist()) <= set(allowed)

            yield _draw(logits, [settings] * 6, draws, check)


def no_numbers(vocab: int) -> Iterator[Call]:
    """A row with NaN of either sign or infinity, or with minus infinity alone, gives -1; the other rows a token."""
    logits = np.random.default_rng(1).standard_normal((8, vocab)).astype(np.float32)
    logits[0], logits[1], logits[2] = np.nan, -np.nan, -np.inf
    logits[3, 77], logits[4, vocab - 1], logits[5, 0] = np.inf, np.nan, -np.nan
    logits[6, :-1] = -np.inf

    def check(found: list[Array]) -> None:
        np.testing.assert_array_equal(found[-1][:7], [-1] * 6 + [vocab - 1])
        assert 0 <= found[-1][7] < vocab

    for settings in (OFF, GREEDY, Settings(0.7, 40, 0.95, 0.05)):
        yield Call(sample_args(logits, [settings] * 8, np.full(8, 0.5)), check, "sample")


def penalties(vocab: int) -> Iterator[Call]:
    """Presence, frequency and repetition penalties; bias of some tokens."""
    logits = np.random.default_rng(2).standard_normal((1, vocab)).astype(np.float32)
    tokens, counts = np.array([5, 1002, 9, 4999], np.int32), np.array([1, 3, 2, 1], np.int32)
    penalty, zeros = np.array([[0.5, 0.25, 1.2]], np.float32), np.zeros(4, np.int32)
    expected = logits.copy()
    expected[0, tokens] -= 0.5 + 0.25 * counts
    expected[0, tokens] *= np.where(expected[0, tokens] < 0, np.float32(1.2), 1 / np.float32(1.2))
    args = (logits, zeros[:1], zeros, tokens, counts, penalty)
    yield Call(args, lambda found: np.testing.assert_allclose(found[0], expected, rtol=1e-6), "apply_penalty_inplace")
    biased, bias = logits.copy(), np.array([1.5, -100.0], np.float32)
    biased[0, [3, 5]] += bias
    args = (logits, zeros[:2], np.array([3, 5], np.int32), bias)
    yield Call(args, lambda found: np.testing.assert_allclose(found[0], biased, rtol=1e-6), "apply_logit_bias_inplace")


CASES = {
    "draws": Sampling(MEDIUM, inverse),
    "draws of 16": Sampling(16, inverse),
    "draws of one": Sampling(1, inverse),
    "draws of a large vocabulary": Sampling(LARGE, large),
    "survivors at the edge": Sampling(1003, at_the_edge),
    "equal weights": Sampling(MEDIUM, ties),
    "rows with their own settings": Sampling(MEDIUM, rows),
    "greedy": Sampling(MEDIUM, greedy),
    "greedy of 16": Sampling(16, greedy),
    "greedy of one": Sampling(1, greedy),
    "masked tokens": Sampling(MEDIUM, masked),
    "logits that are no numbers": Sampling(MEDIUM, no_numbers),
    "penalties and bias": Sampling(MEDIUM, penalties),
    "ids without tokens": Forbidding(),
}
