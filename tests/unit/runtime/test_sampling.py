"""The compiled sampler against transformers' processors and numpy, and the settings of `Engine.generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray

from mlcpipe import Engine, SamplingParams
from mlcpipe.errors import TokenizerError, UsageError
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.sampler import Row, Sampler
from tests.conftest import TOKENS

if TYPE_CHECKING:
    from tests.conftest import Bundles

GREEDY = SamplingParams(temperature=0)
PROMPT = [72, 101, 108, 108, 111]
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def bundle(tiny_bundles: Bundles) -> LoadedBundle:
    return load_bundle(tiny_bundles["q0f32"], threads=2)


class Draws:
    """One sequence whose tokens are drawn from logits on the device, and counted."""

    def __init__(self, bundle: LoadedBundle, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self.sampler, self.row, self.position = Sampler(bundle), Row(params, prompt), len(prompt)

    def draw(self, logits: Any) -> int:
        self.sampler.prepare([self.row], [self.position])
        token = int(self.sampler.sample(logits).numpy()[0])
        self.row.accept(token)
        self.position += 1
        return token


def random_logits(vocab: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(vocab) * 2.5).astype(np.float32)


def drawn_from(logits: NDArray[Any]) -> NDArray[Any]:
    """What is left of logits: rows without a token have the lowest."""
    left = logits.copy()
    left[..., TOKENS:] = np.float32(-3.4e38)
    return left


def on_device(logits: Array) -> Any:
    return tvm.runtime.tensor(logits.reshape(1, -1))


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def warped(logits: Array, params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities by transformers' warpers, in the order of its `generate`."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    warpers = [process.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(process.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return np.asarray(torch.softmax(scores, -1)[0].numpy())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_p=1.0, seed=1),
        pytest.param(SamplingParams(temperature=0.5, top_p=1.0, seed=2), marks=pytest.mark.everything),
        SamplingParams(temperature=1.5, top_p=0.8, seed=3),
        SamplingParams(temperature=1.0, top_p=1.0, top_k=7, seed=4),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=30, seed=5),
        SamplingParams(temperature=1.2, top_p=1.0, min_p=0.1, seed=6),
        SamplingParams(temperature=1.2, top_p=0.7, top_k=20, min_p=0.05, seed=7),
        pytest.param(SamplingParams(temperature=2.0, top_p=0.05, seed=8), marks=pytest.mark.everything),
        pytest.param(SamplingParams(temperature=2.0, top_p=1.0, top_k=1, seed=9), marks=pytest.mark.everything),
    ],
    ids=str,
)
def test_draws_have_the_distribution_of_the_warpers(bundle: LoadedBundle, params: SamplingParams) -> None:
    logits = random_logits(bundle.manifest.model.vocab_size)
    expected = warped(drawn_from(logits), params)
    draws_of, device = Draws(bundle, params), on_device(logits)
    draws = 20_000
    counts = np.zeros(len(logits))
    for token, count in Counter(draws_of.draw(device) for _ in range(draws)).items():
        counts[token] = count
    assert not counts[expected == 0].any()
    likely = expected * draws >= 5
    squared = (counts - expected * draws)[likely] ** 2 / (expected * draws)[likely]
    # Chi-square: mean k - 1, variance 2 (k - 1); five deviations.
    freedom = max(int(likely.sum()) - 1, 1)
    assert squared.sum() < freedom + 5 * np.sqrt(2 * freedom)


def test_huge_settings_are_no_limits(bundle: LoadedBundle) -> None:
    logits = random_logits(bundle.manifest.model.vocab_size)
    wide = SamplingParams(temperature=1.0, top_p=1.0, seed=3)
    huge = SamplingParams(temperature=1.0, top_p=1.0, seed=3, top_k=2**40)
    one, other = Draws(bundle, wide), Draws(bundle, huge)
    assert [one.draw(on_device(logits)) for _ in range(50)] == [other.draw(on_device(logits)) for _ in range(50)]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6])
def test_coldest_temperatures_are_greedy(bundle: LoadedBundle, temperature: float) -> None:
    logits = random_logits(bundle.manifest.model.vocab_size)
    draws = Draws(bundle, SamplingParams(temperature=temperature, top_p=1.0, seed=0))
    assert {draws.draw(on_device(logits)) for _ in range(20)} == {int(drawn_from(logits).argmax())}


def test_greedy_takes_the_lowest_of_equal_logits(bundle: LoadedBundle) -> None:
    logits = random_logits(bundle.manifest.model.vocab_size)
    logits[[40, 90, 256]] = logits.max() + 1
    assert Draws(bundle, GREEDY).draw(on_device(logits)) == 40


@pytest.mark.parametrize("penalty", [1.3, 0.7, 5.0])
def test_repetition_penalty_is_transformers(bundle: LoadedBundle, penalty: float) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    processor = process.RepetitionPenaltyLogitsProcessor(penalty)
    draws = Draws(bundle, SamplingParams(temperature=0, repetition_penalty=penalty), PROMPT)
    seen = list(PROMPT)
    for step in range(4):
        logits = random_logits(bundle.manifest.model.vocab_size, step)
        device = on_device(logits)
        token = draws.draw(device)
        expected = processor(torch.tensor([seen]), torch.from_numpy(logits)[None].clone())[0].numpy()
        expected = drawn_from(expected)
        np.testing.assert_allclose(device.numpy()[0], expected, rtol=1e-6)
        assert token == expected.argmax()
        seen.append(token)


def test_presence_and_frequency_are_openai(bundle: LoadedBundle) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence over the answer, not the prompt (OpenAI API reference)."""
    params = SamplingParams(temperature=0, presence_penalty=0.6, frequency_penalty=0.9)
    draws = Draws(bundle, params, PROMPT)
    base = random_logits(bundle.manifest.model.vocab_size)
    counts = np.zeros(len(base), np.float32)
    for _ in range(12):
        device = on_device(base)
        token = draws.draw(device)
        expected = drawn_from(base - counts * np.float32(0.9) - (counts > 0) * np.float32(0.6))
        np.testing.assert_allclose(device.numpy()[0], expected, rtol=0, atol=2e-6)
        assert token == expected.argmax()
        counts[token] += 1
    assert counts.max() > 1


def test_penalties_of_many_tokens(bundle: LoadedBundle) -> None:
    vocab = bundle.manifest.model.vocab_size
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    draws = Draws(bundle, params, [*range(vocab), *range(0, vocab, 2)])
    base = random_logits(vocab)
    device = on_device(base)
    draws.draw(device)
    expected = drawn_from(np.where(base < 0, base * 2, base / 2))
    np.testing.assert_allclose(device.numpy()[0], expected, rtol=1e-6)


def test_logit_bias(bundle: LoadedBundle) -> None:
    base = random_logits(bundle.manifest.model.vocab_size)
    best = int(drawn_from(base).argmax())
    params = SamplingParams(temperature=0, logit_bias={best: -100, 5: 3.5, 6: -0.25, TOKENS: 100})
    device = on_device(base)
    token = Draws(bundle, params).draw(device)
    expected = drawn_from(base)
    expected[best] -= 100
    expected[5] += 3.5
    expected[6] -= 0.25
    np.testing.assert_allclose(device.numpy()[0], expected, rtol=1e-6)
    assert token == expected.argmax() != best


def test_logit_bias_outside_the_vocabulary(tiny: Engine) -> None:
    with pytest.raises(UsageError, match="logit_bias names a token"):
        tiny.generate(PROMPT, sampling=SamplingParams(logit_bias={tiny.vocab_size: 1.0}))


def test_greedy_is_the_largest_logit(tiny: Engine) -> None:
    tokens = tiny.generate(PROMPT, sampling=GREEDY, max_tokens=12, ignore_eos=True).token_ids
    logits = drawn_from(tiny.logits([*PROMPT, *tokens]))
    assert tokens == [int(row.argmax()) for row in logits[len(PROMPT) - 1 : -1]]


def test_a_seed_fixes_the_text(tiny: Engine) -> None:
    def draw(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return tiny.generate(PROMPT, sampling=params, max_tokens=24, ignore_eos=True).token_ids

    first = draw(11)
    assert draw(11) == first
    assert draw(12) != first
    assert draw(2**64 - 1) == draw(2**64 - 1)
    assert draw(None) != draw(None)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_logprobs(tiny: Engine, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=1.0, seed=5, logprobs=4)
    done = tiny.generate(PROMPT, sampling=params, max_tokens=10, ignore_eos=True)
    assert done.logprobs is not None and len(done.logprobs) == 10
    rows = drawn_from(tiny.logits([*PROMPT, *done.token_ids])[len(PROMPT) - 1 : -1].astype(np.float64))
    expected = log_softmax(rows / (temperature or 1.0))
    for entry, token, row in zip(done.logprobs, done.token_ids, expected):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:4]
        assert [top.token_id for top in entry.top] == best.tolist()
        np.testing.assert_allclose([top.logprob for top in entry.top], row[best], atol=1e-4)
        assert entry.bytes == tiny.tokenizer.token_bytes(token)


def test_logprobs_stay_finite(tiny: Engine) -> None:
    """A probability that float32 cannot hold still has a logarithm."""
    params = SamplingParams(temperature=0.01, top_p=1.0, seed=5, logprobs=20)
    done = tiny.generate(PROMPT, sampling=params, max_tokens=3, ignore_eos=True)
    assert done.logprobs is not None
    logs = [top.logprob for entry in done.logprobs for top in entry.top]
    assert np.isfinite(logs).all() and min(logs) < -110


def test_logprobs_are_absent_unless_asked(tiny: Engine) -> None:
    assert tiny.generate(PROMPT, sampling=GREEDY, max_tokens=2, ignore_eos=True).logprobs is None


def test_logprobs_need_a_tokenizer(bare_bundle: Path) -> None:
    engine = Engine(bare_bundle)
    with pytest.raises(TokenizerError):
        engine.generate(PROMPT, sampling=SamplingParams(logprobs=1), ignore_eos=True)
