"""How long a step takes, learned from past steps: it sizes prefill to `--step-ms`, and drafts to what they gain.

It pays where nobody knows these costs: they differ by device, model, context and whatever else the machine does.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from tir_schedules.step_layout import PAGE

# Before the first measurement: a model of 0.5 GB on two cores, in seconds.
DEFAULT_COSTS = (20e-3, 2e-3, 20e-3, 1.5e-3, 0.5e-6, 0.2e-6)
_MIN_SPEEDUP = 1.05  # of drafts, in tokens per second
_TRY_EVERY = 4  # choices of drafts, one of which may try a number that seems worse
_TRIAL_SHARE = 0.01  # of the time, that such trials may lose
_MIN_TRIAL_SHARE, _TRIAL_DECAY = 0.0025, 0.7  # its minimum, and its factor after each trial without success
_MAX_LOSS_STEPS = 2  # that one trial may lose
_MIN_S = 1e-9  # where keys seem to take all the time
_CURVES_EVERY = 4  # measurements, after which the times of decode rows are computed again
_HISTORY = 12  # measurements kept per class of sizes
_SAMPLES = 5  # measurements kept per number of decode rows; their median counts
_FRESH = 32  # measurements, after which those of a number of rows may be stale, and a change of pace is permanent
_STALE_AFTER = 2 * _FRESH  # measurements, after which a step without drafts is tried before others
_PACE_TOLERANCE = 1.25  # factor, in both directions, within which steps take what they usually take
_PRIOR_WEIGHT = 0.02  # of the default costs' ratios, against one measurement
_OUTLIER = 0.15  # a relative error at which a measurement counts half
_ROUNDS = 4  # of reweighting
_FIT_EVERY = 32  # measurements, once there are as many
_LATE_SHARE = 0.2  # of steps with both kinds of rows, that may take longer than planned
_MAX_MARGIN = 1.3  # outliers shall not stop prompts
_MIN_MIXED = 8  # measurements of such steps, to know how long the longer ones take


@dataclass(frozen=True)
class Load:
    """The work of a step: rows of each kind, and the keys that they attend to, summed over rows."""

    decode: int = 0
    decode_keys: int = 0
    prefill: int = 0
    prefill_keys: int = 0

    def features(self) -> tuple[float, ...]:
        """In the order of costs: a decode pass, a decode row, a prefill pass, a prefill row, a key of each."""
        return (self.decode > 0, self.decode, self.prefill > 0, self.prefill, self.decode_keys, self.prefill_keys)

    def size_class(self) -> tuple[int, ...]:
        """Loads that differ by less than a factor of two in each respect."""
        return (
            self.decode.bit_length(),
            self.prefill.bit_length(),
            (self.decode_keys + self.prefill_keys).bit_length(),
        )


class CostModel:
    """Seconds of a step as a sum over `Load.features`, each with a cost that is not negative.

    The costs are a least-squares fit of relative errors over the latest measurements of each class of sizes, so that a
    long time of one kind of step does not drown the others. A measurement far from the fit counts little (Cauchy's
    weights, Holland and Welsch 1977): on a busy machine some steps take many times longer. What the measurements do not
    determine follows the default costs, scaled to the machine.
    """

    def __init__(self, costs: tuple[float, ...] = DEFAULT_COSTS, learn: bool = True) -> None:
        self.costs = costs
        self._prior = np.array(costs)
        self._learn = learn
        self._count = 0
        self._measured: dict[tuple[int, ...], deque[tuple[tuple[float, ...], float]]] = {}
        self._decode_times: dict[int, deque[float]] = {}  # of steps without prefill, by decode rows, without keys
        self._paces: deque[float] = deque(maxlen=_SAMPLES)  # of the latest, relative to others of as many rows
        self._usual_at = 0  # the last measurement of the usual pace
        self._decode_curve: list[float] = []  # what `_curves` returned last
        self._hoped_curve: list[float] = []
        self._may_draft: dict[tuple[int, int], bool] = {}  # what `may_draft` found with these curves
        self._choices, self._loss_budget_s = 0, 0.0  # seconds that trials may still lose
        self._trial_share, self._on_trial = _TRIAL_SHARE, False  # whether the last choice was a trial
        self._measured_at: dict[int, int] = {}  # by decode rows, the last measurement
        self._margin = 1.0  # time of the longer steps with both kinds of rows, relative to the costs

    def seconds(self, load: Load) -> float:
        """Expected for a step."""
        return sum(cost * feature for cost, feature in zip(self.costs, load.features()))

    def row_seconds(self, load: Load) -> float:
        """What the rows and keys of a load add to a step that has rows of both kinds anyway."""
        return self.seconds(load) - (load.decode > 0) * self.costs[0] - (load.prefill > 0) * self.costs[2]

    def prompt_rows(self, load: Load, step_s: float, depth: int = 0, most: int = 1 << 20) -> int:
        """How many prompt rows, the first at position `depth`, fit into a step of `step_s` beside this load.

        Most such steps then take less: of those measured, all but a fifth. A multiple of a page, at least one: prompts
        progress, however slow the device is.
        """
        _, _, base, row, _, key = self.costs
        left = step_s / self._margin - self.seconds(load) - (0.0 if load.prefill else base)
        # n rows cost n row + (n depth + n (n + 1) / 2) key.
        linear, rows = row + key * (depth + 0.5), float(most)
        if left <= 0:
            return min(PAGE, most)
        if key > 0:
            rows = (math.sqrt(linear * linear + 2 * key * left) - linear) / key
        elif linear > 0:
            rows = left / linear
        return min(most, max(PAGE, int(min(rows, most)) // PAGE * PAGE))

    def decode_rows_for(self, prefill: int) -> int:
        """How many decode rows cost as much as this many prefill rows, at least one."""
        decode, row = self.costs[1], self.costs[3]
        return max(1, min(prefill, int(prefill * row / decode) if decode > 0 else prefill))

    def decode_seconds(self, load: Load, most: int = 0) -> float:
        """Expected for a step of decode rows alone; the curves then cover steps of up to `most` rows."""
        if max(load.decode, most) >= len(self._decode_curve):
            self._decode_curve, self._hoped_curve = self._curves(max(load.decode, most) + 1)
        return self._decode_curve[load.decode] + self.costs[4] * load.decode_keys

    def may_draft(self, load: Load, most: int) -> bool:
        """Whether up to `most` drafted tokens, if all are accepted, may be worth their rows, keys aside."""
        self.decode_seconds(load, load.decode + most)
        may = self._may_draft.get((load.decode, most))
        if may is None:
            tokens = range(load.decode, load.decode + most + 1)
            may = self._may_draft[load.decode, most] = _fastest(tokens, self._hoped_curve[load.decode :]) > 0
        return may

    def draft_rows(self, load: Load, gains: Sequence[float]) -> int:
        """How many drafted tokens to check in a step of this load, which has decode rows alone.

        Each adds a row. They are accepted with the probabilities `gains`, the largest first; the result maximizes
        tokens per second.
        """
        return self._choose(load, gains, 1, 0.0)

    def draft_length(self, load: Load, rates: Sequence[float], token_s: float, most: int) -> int:
        """How many tokens, up to `most`, a draft model should propose to each of some answers of this load.

        Each of its tokens is accepted with the answer's rate if those before it are; one for each answer takes it
        `token_s`. The result maximizes tokens per second; 0 where drafts do not pay.
        """
        gains = [sum(rate**length for rate in rates) for length in range(1, most + 1)]
        return self._choose(load, gains, len(rates), token_s)

    def _choose(self, load: Load, gains: Sequence[float], rows: int, draft_s: float) -> int:
        """How many drafts maximize tokens per second: each gains tokens, takes `rows` rows, and `draft_s` to make.

        One call in `_TRY_EVERY` tries a number that may be better, the most promising one, if the trial cannot lose
        much. After unsuccessful trials less may be lost.
        """
        self.decode_seconds(load, load.decode + len(gains) * rows)
        tokens = list(itertools.accumulate(gains, initial=float(load.decode)))
        key_s = self.costs[4] * load.decode_keys / load.decode
        more = [load.decode * key_s + (rows * key_s + draft_s) * number for number in range(len(tokens))]
        expected = list(map(operator.add, self._decode_curve[load.decode :: rows], more))
        best = _fastest(tokens, expected)
        if best:
            self._trial_share = _TRIAL_SHARE
        elif self._on_trial:
            self._trial_share = max(_MIN_TRIAL_SHARE, _TRIAL_DECAY * self._trial_share)
        self._choices, self._on_trial = self._choices + 1, False
        if self._choices % _TRY_EVERY or not self._usual:
            return best
        hoped = list(map(operator.add, self._hoped_curve[load.decode :: rows], more))
        speed = tokens[best] / expected[best]
        better = speed if best else _MIN_SPEEDUP * speed
        self._loss_budget_s = min(
            self._loss_budget_s + _TRY_EVERY * self._trial_share * expected[best], _MAX_LOSS_STEPS * expected[best]
        )
        others = [
            (tokens[number] / hoped[number], number, lost_s)
            for number, made in enumerate(tokens)
            if number != best and made > better * hoped[number]
            if (lost_s := max(0.0, expected[number] - made / speed)) <= self._loss_budget_s
        ]
        old = self._count - self._measured_at.get(load.decode, -_STALE_AFTER) >= _STALE_AFTER
        if best and old and tokens[0] > better * hoped[0]:
            others = [one for one in others if one[1] == 0]
        if others:
            _, best, lost_s = max(others)
            self._loss_budget_s, self._on_trial = self._loss_budget_s - lost_s, True
        return best

    def _curves(self, size: int) -> tuple[list[float], list[float]]:
        """Seconds of steps of 0 to `size` - 1 decode rows, without keys: those expected, and those hoped for.

        Kernels compute rows in blocks, so these times have steps. A number that was not measured is expected on the
        line between the next smaller and the next larger one that were, or follows the costs where one of them is
        missing. If it was not measured lately, the best that may be hoped for is the time of a smaller number, as in
        one block, and at most the rows per second of the best larger number.
        """
        known = [rows for rows in sorted(self._decode_times) if rows < size]
        medians = {rows: median_low(self._decode_times[rows]) for rows in known}
        costs = [max(self.costs[0] + rows * self.costs[1], _MIN_S) for rows in range(size)]
        scale = medians[known[0]] / costs[known[0]] if known else 1.0
        expected: list[float] = []
        for rows, seconds in enumerate(costs):
            scale = medians[rows] / seconds if rows in medians else scale
            expected.append(scale * seconds)
        for smaller, larger in itertools.pairwise(known):
            row_s = (medians[larger] - medians[smaller]) / (larger - smaller)
            for rows in range(smaller + 1, larger):
                expected[rows] = medians[smaller] + (rows - smaller) * row_s
        fresh = {rows for rows in known if self._count - self._measured_at[rows] < _FRESH}
        hoped, least, row_s = list(expected), 0.0, math.inf
        for rows in reversed(range(size if fresh else 0)):
            row_s = min(row_s, medians[rows] / rows) if rows in fresh else row_s
            hoped[rows] = row_s * rows if row_s < math.inf else 0.0
        for rows in range(size if fresh else 0):
            least = medians[rows] if rows in fresh else least
            hoped[rows] = min(expected[rows], max(least, hoped[rows]))
        return expected, hoped

    def observe(self, load: Load, seconds: float) -> None:
        """Record how long a step of this load took."""
        if not self._learn or not (load.decode or load.prefill) or not 0 < seconds < math.inf:
            return
        kept = self._measured.setdefault(load.size_class(), deque(maxlen=_HISTORY))
        kept.append((load.features(), seconds))
        if not load.prefill:
            seconds_alone = seconds * self.seconds(Load(decode=load.decode)) / self.seconds(load)
            self._observe_decode(load.decode, max(_MIN_S, seconds_alone))
        self._count += 1
        if self._count % _CURVES_EVERY == 0:
            self._decode_curve, self._may_draft = [], {}
        if self._count % _FIT_EVERY == 0 or self._count & (self._count - 1) == 0:
            self._fit()

    def _observe_decode(self, rows: int, seconds: float) -> None:
        """Record the seconds of a step of decode rows, without keys.

        While steps of all sizes take longer or shorter than they did, the stored times stay, so that times of two sizes
        are never compared at different speeds. If the change lasts, all times are scaled alike.
        """
        lately = self._count - self._measured_at.get(rows, -_FRESH) < _FRESH
        if rows in self._decode_times and (lately or not self._usual):
            self._paces.append(seconds / median_low(self._decode_times[rows]))
            self._measured_at[rows] = self._count
        if self._usual:
            if not lately:
                self._decode_times[rows] = deque(maxlen=_SAMPLES)
            self._decode_times[rows].append(seconds)
            self._measured_at[rows] = self._usual_at = self._count
        elif self._count - self._usual_at >= _FRESH:
            pace = median_low(self._paces)
            self._decode_times = {
                rows: deque((pace * one for one in times), maxlen=_SAMPLES)
                for rows, times in self._decode_times.items()
            }
            self._paces.clear()

    @property
    def _usual(self) -> bool:
        """Whether the latest steps took about as long as earlier ones of as many rows."""
        return not self._paces or 1 / _PACE_TOLERANCE < median_low(self._paces) < _PACE_TOLERANCE

    def _fit(self) -> None:
        kept = [one for each in self._measured.values() for one in each]
        loads, seconds = np.array([one[0] for one in kept]), np.array([one[1] for one in kept])
        scale = float(np.median(seconds / (loads @ self._prior)))
        prior = self._prior * scale
        # In units of the scaled prior, relative to what was measured: all columns have the same scale.
        rows = loads * prior / seconds[:, None]
        weights = np.ones(len(kept))
        for _ in range(_ROUNDS):
            fit = _positive_fit(rows, weights)
            weights = 1 / (1 + ((rows @ fit - 1) / _OUTLIER) ** 2)
        self.costs = tuple(float(cost) for cost in fit * prior)
        mixed = (loads[:, 0] > 0) & (loads[:, 2] > 0)
        if mixed.sum() >= _MIN_MIXED:
            late = float(np.quantile(1 / (rows @ fit)[mixed], 1 - _LATE_SHARE))
            self._margin = min(max(1.0, late), _MAX_MARGIN)


def _fastest(tokens: Sequence[float], seconds: list[float]) -> int:
    """Index of the step with the most tokens per second; the first, without drafts, unless `_MIN_SPEEDUP` times it."""
    best, speed = 0, _MIN_SPEEDUP * tokens[0] / seconds[0]
    for number in range(1, len(tokens)):
        if tokens[number] > speed * seconds[number]:
            best, speed = number, tokens[number] / seconds[number]
    return best


def _positive_fit(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin over x >= 0 of sum of weights (rows x - 1)^2 + prior weight * |x - 1|^2; negative entries are dropped."""
    size = rows.shape[1]
    left, right = (rows.T * weights) @ rows + _PRIOR_WEIGHT * np.eye(size), (rows.T * weights).sum(1) + _PRIOR_WEIGHT
    active = np.ones(size, bool)
    while True:
        fit = np.zeros(size)
        fit[active] = np.linalg.solve(left[np.ix_(active, active)], right[active])
        if (fit >= 0).all():
            return fit
        active &= fit > 0
