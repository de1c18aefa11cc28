"""Samplers that the compiled one does not have, each by which tokens it leaves: numpy over one row of logits.

Order and formulas are llama.cpp's (`src/llama-sampler.cpp`): top-n-sigma (arXiv:2411.07641), top-k, locally typical
(arXiv:2202.00666), top-p, min-p, XTC (text-generation-webui #6335), then temperature. Mirostat (arXiv:2007.14966) comes
after temperature, and its surprise is measured in bits among the tokens that it leaves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import SamplingParams

Ids = NDArray[np.intp]
Numbers = NDArray[np.float64]
_MASKED = np.float32(-3e38)  # logits of tokens that may not come are below
_FIRST = 256  # tokens that are sorted before more are
_ESTIMATED = 100  # of the most probable tokens, whose exponent Mirostat 1 estimates
_MIN_TEMPERATURE = 1e-6  # as the compiled softmax


@dataclass(frozen=True)
class Truncation:
    """Settings with llama.cpp's names and neutral values.

    typical_p        (0, 1]; probability of the tokens whose surprise is nearest to the entropy, 1 for all
    top_n_sigma      standard deviations of the logits below the largest one; 0 or less for no limit
    xtc_probability  [0, 1]; how often the tokens of at least `xtc_threshold`, but the least probable, are left out
    xtc_threshold    [0, 1]; above 0.5 no two tokens have it, so that it does nothing
    told             whether the probabilities of what is left are reported, so that top-k, top-p and min-p are applied
                     here too; where nothing else is, after temperature, as the compiled sampler does
    mirostat         0, or version 1 or 2; mirostat_tau (bits of surprise to keep), mirostat_eta (its learning rate)

    Raises UsageError.
    """

    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    told: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("typical_p", 0.0, 1.0), ("top_n_sigma", -1e6, 1e6), ("xtc_probability", 0.0, 1.0),
            ("xtc_threshold", 0.0, 1.0), ("mirostat_tau", 0.0, 100.0), ("mirostat_eta", 0.0, 10.0),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise UsageError(name, expected=f"a number from {low:g} to {high:g}", found=getattr(self, name))
        if self.mirostat not in (0, 1, 2):
            raise UsageError("mirostat", expected="0, 1 or 2", found=self.mirostat)

    @property
    def neutral(self) -> bool:
        """Whether it leaves all tokens, or those that the compiled sampler leaves, which nobody asks about."""
        return self.alone and not self.told

    @property
    def alone(self) -> bool:
        """Whether top-k, top-p and min-p are all that leaves tokens out."""
        xtc = self.xtc_probability > 0 and self.xtc_threshold <= 0.5
        return self.typical_p >= 1 and self.top_n_sigma <= 0 and not xtc and not self.mirostat


class Truncator:
    """The tokens of one answer: `left` for each row of logits, `accept` for each token. Mirostat learns from these."""

    def __init__(self, truncation: Truncation, params: SamplingParams) -> None:
        self._set, self._params = truncation, params
        self._most_bits = 2 * truncation.mirostat_tau  # of surprise: mu
        self._left: Ids = np.zeros(0, np.intp)
        self._bits: Numbers = np.zeros(0)  # of those left

    def left(self, logits: NDArray[np.float32], number: float) -> Ids:
        """Ascending ids of the tokens of logits f32[V] that remain; all are left if none is finite.

        `number`, uniform in [0, 1), decides about XTC.
        """
        ids = np.flatnonzero(~(logits <= _MASKED))  # NaN stays
        logs = logits[ids].astype(np.float64)
        if not len(ids) or not np.isfinite(logs).all():
            return np.arange(len(logits))
        chosen, params = self._set, self._params
        if chosen.told and params.greedy:
            return ids
        if chosen.told and chosen.alone:
            logs = logs / max(params.temperature, _MIN_TEMPERATURE)
        if chosen.top_n_sigma > 0:
            ids, logs = _only(ids, logs, logs >= logs.max() - chosen.top_n_sigma * logs.std())
        if 0 < params.top_k < len(ids):
            ids, logs = _only(ids, logs, np.sort(_smallest(-logs, params.top_k)))
        if chosen.typical_p < 1:
            bits = -_log_softmax(logs)
            entropy = float((np.exp(-bits) * bits).sum())
            ids, logs = _only(ids, logs, _with_mass(np.abs(bits - entropy), logs, chosen.typical_p, above=True))
        if params.top_p < 1:
            ids, logs = _only(ids, logs, _with_mass(-logs, logs, params.top_p))
        if params.min_p > 0:
            ids, logs = _only(ids, logs, logs >= logs.max() + math.log(params.min_p))
        if chosen.xtc_probability > 0 and number <= chosen.xtc_probability:
            ids, logs = _only(ids, logs, _without_top(logs, chosen.xtc_threshold))
        if chosen.mirostat and not params.greedy:
            logs = logs / max(params.temperature, _MIN_TEMPERATURE)
            ids, logs = _only(ids, logs, self._unsurprising(logs, len(logits)))
            self._left, self._bits = ids, -_log_softmax(logs) / math.log(2)
        return ids

    def accept(self, token: int) -> None:
        """Learn from a sampled token."""
        if len(self._left):
            observed = self._bits[min(int(np.searchsorted(self._left, token)), len(self._bits) - 1)]
            self._most_bits -= self._set.mirostat_eta * (float(observed) - self._set.mirostat_tau)

    def _unsurprising(self, logs: Numbers, vocab: int) -> NDArray[np.bool_] | Ids:
        if self._set.mirostat == 2:
            kept: NDArray[np.bool_] = -_log_softmax(logs) / math.log(2) <= self._most_bits
            kept[np.argmax(logs)] = True
            return kept
        count = _zipf_count(logs, self._most_bits, vocab)
        return np.sort(_smallest(-logs, count)) if count < len(logs) else np.ones(len(logs), bool)


def _zipf_count(logs: Numbers, bits: float, vocab: int) -> int:
    """How many tokens Mirostat 1 leaves: its equation 10, the exponent by least squares over the most probable ones."""
    best = logs[_smallest(-logs, _ESTIMATED)]
    if len(best) < 2:
        return len(logs)
    ranks = np.arange(1, len(best))
    steps = np.log((ranks + 1) / ranks)
    exponent = float((steps * -np.diff(best)).sum() / (steps * steps).sum())
    excess = exponent - 1
    with np.errstate(all="ignore"):
        part = np.float64(math.log(vocab) if abs(excess) < 1e-9 else (1 - np.float64(vocab) ** -excess) / excess)
        count = (np.float64(2) ** bits / part) ** (1 / np.float64(exponent))
    return max(1, int(count)) if count < len(logs) else len(logs)


def _without_top(logs: Numbers, threshold: float) -> NDArray[np.bool_]:
    """XTC: without the tokens of at least this probability, of which the least probable stays."""
    kept: NDArray[np.bool_] = np.ones(len(logs), bool)
    top = np.flatnonzero(_log_softmax(logs) >= (math.log(threshold) if threshold > 0 else -math.inf))
    if threshold <= 0.5 and len(top) > 1:
        kept[top[np.argsort(-logs[top], kind="stable")][:-1]] = False
    return kept


def _only(ids: Ids, logs: Numbers, kept: NDArray[np.bool_] | Ids) -> tuple[Ids, Numbers]:
    return ids[kept], logs[kept]


def _log_softmax(logs: Numbers) -> Numbers:
    moved: Numbers = logs - logs.max()
    return moved - math.log(float(np.exp(moved).sum()))


def _smallest(keys: Numbers, count: int) -> Ids:
    """Places of the `count` smallest keys in their order, the earlier one of equal ones first."""
    if count < len(keys):
        places = np.flatnonzero(keys <= np.partition(keys, count - 1)[count - 1])
        return places[np.argsort(keys[places], kind="stable")][:count]
    return np.argsort(keys, kind="stable")


def _with_mass(keys: Numbers, logs: Numbers, mass: float, *, above: bool = False) -> Ids:
    """Ascending places of the smallest keys whose probabilities sum to `mass`, or `above` it; all if they do not."""
    probabilities = np.exp(_log_softmax(logs))
    count = _FIRST
    while True:
        places = _smallest(keys, count)
        sums = np.cumsum(probabilities[places])
        end = int(np.searchsorted(sums, mass, "right" if above else "left"))
        if end < len(places):
            return np.sort(places[: end + 1])
        if count >= len(keys):
            return np.arange(len(keys))
        count *= 16
