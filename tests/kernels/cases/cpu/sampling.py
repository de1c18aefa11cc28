"""Cases of `sample`: numpy's draw, after the warpers of transformers in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from tvm import tirx

from tests.kernels.harness import Array, Call, Case
from tir_schedules.cpu.sampling import sampling_functions


@dataclass(frozen=True)
class SamplingKernel:
    """One of `sampling_functions`."""

    name: str
    vocab: int

    @property
    def symbol(self) -> str:
        return f"{self.name}_{self.vocab}"

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        return _functions(self.vocab)[self.name]


@cache
def _functions(vocab: int) -> dict[str, tirx.PrimFunc]:
    return sampling_functions(vocab)


@dataclass(frozen=True)
class Settings:
    """What shapes a distribution. top_k 0 and top_p 1 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def survivors(logits: Array, s: Settings) -> tuple[Array, Array]:
    """Ids, best first and then by id, that may be drawn, and their probabilities before top-p, in float64.

    transformers' order (generation/logits_process.py): temperature, top-k, top-p (the smallest set of the best
    whose sum reaches it), min-p (relative to the best).
    """
    x = logits.astype(np.float64) / s.temperature
    weight = np.exp(x - x.max())
    order = np.argsort(-weight, kind="stable")
    if s.top_k:
        order = order[: s.top_k]
    share = weight[order] / weight[order].sum()
    if s.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(share), s.top_p)) + 1]
    kept = order[weight[order] >= s.min_p]
    return kept, weight[kept]


def sample_args(logits: Array, settings: list[Settings], draws: Array) -> tuple[Array, ...]:
    """Arguments of `sample` for logits f32[b, V] and one setting and draw a row; the last is the output."""
    columns = [np.array([getattr(s, n) for s in settings], d) for n, d in _COLUMNS]
    return (logits[:, None, :], *columns, draws.astype(np.float32), np.full(len(logits), -7, np.int32))


_COLUMNS = (("temperature", "float32"), ("top_p", "float32"), ("top_k", "int32"), ("min_p", "float32"))


def sample_call(vocab: int, settings: Settings) -> Call:
    """The draw that lies in the middle of the best token's share."""
    logits = np.random.default_rng(vocab).standard_normal((1, vocab)).astype(np.float32) * 3
    if settings.temperature == 0:
        return Call(sample_args(logits, [settings], np.zeros(1)), {6: (logits.argmax(axis=1).astype(np.float64), 0.0)})
    kept, weight = survivors(logits[0], settings)
    ordered = settings.top_p < 1 or 0 < settings.top_k < vocab
    at = 0 if ordered else int(np.flatnonzero(np.sort(kept) == kept[0])[0])
    weight = weight if ordered else weight[np.argsort(kept)]
    draw = (weight[:at].sum() + weight[at] / 2) / weight.sum()
    return Call(sample_args(logits, [settings], np.array([draw])), {6: (np.array([float(kept[0])]), 0.0)})


def cases() -> Iterator[Case]:
    """The settings that users choose, with the vocabulary of Qwen 2.5."""
    vocab = 151936
    kernel = SamplingKernel("sample", vocab)
    for name, settings in (
        ("greedy", Settings(0.0, 0, 1.0, 0.0)),
        ("plain", Settings(0.7, 0, 1.0, 0.0)),
        ("top_p", Settings(0.7, 0, 0.95, 0.0)),
        ("top_k", Settings(1.0, 40, 1.0, 0.0)),
        ("all", Settings(0.7, 40, 0.95, 0.05)),
    ):
        yield Case(
            f"{kernel.symbol}-{name}",
            "timed-sampling",
            kernel,
            partial(sample_call, vocab, settings),
            nbytes=4 * vocab,
            timed=True,
        )


def some_settings(rng: np.random.Generator, vocab: int) -> Settings:
    return Settings(
        float(rng.choice([0.5, 1.0, 1.7])),
        int(rng.choice([0, 1, 5, 50, vocab, 2 * vocab])),
        float(rng.choice([1.0, 0.9, 0.5, 0.05])),
        float(rng.choice([0.0, 0.05, 0.3])),
    )


def some_logits(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    spread = rng.choice([0.1, 1.0, 4.0], (rows, 1))
    logits: Array = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    return logits


def edges(vocab: int, trials: int) -> Iterator[tuple[Array, Settings, Array]]:
    """Logits, settings whose top-p lies between two sums of probabilities, and the tokens that they keep, best first."""
    rng = np.random.default_rng(vocab + 1)
    for _ in range(trials):
        logits = some_logits(rng, 1, vocab)
        base = Settings(float(rng.choice([0.7, 1.0])), int(rng.choice([0, 4, 50])), 1.0, 0.0)
        kept, weight = survivors(logits[0], base)
        count = int(rng.integers(1, min(len(kept), 60) + 1))
        sums = np.cumsum(weight) / weight.sum()
        edge = float((sums[count - 2] if count > 1 else 0.0) + sums[count - 1]) / 2
        settings = Settings(base.temperature, base.top_k, min(edge, 0.9999), 0.0)
        yield logits, settings, survivors(logits[0], settings)[0]
