"""How long a step takes, learned from the steps that were."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from numpy.typing import NDArray

from tir_schedules.step_layout import PAGE

# Before the first measurement: a model of 0.5 GB on two cores, in seconds.
DEFAULT_COSTS = (20e-3, 2e-3, 20e-3, 1.5e-3, 0.5e-6, 0.2e-6)
_WORTH = 1.05  # times the tokens a second without drafts
_TRY_EVERY = 4  # choices of drafts, one of which may try a number that seems worse
_TRIED = 0.01  # share of the time that may be lost by that
_LEAST_TRIED, _LESS = 0.0025, 0.7  # without drafts so little at least, each time less that they were tried in vain
_MOST_LOST = 2  # steps, that may be lost by one
_LEAST_S = 1e-9  # where keys seem to take all time
_NEW_CURVES = 4  # measurements after which the times of few rows are computed anew
_KEPT = 12  # measurements of a class of sizes
_LATEST = 5  # measurements of a number of few rows, of which the median counts
_FRESH = 32  # measurements, after which those of such a number may be old, and what lasts is not a moment
_OLD = 2 * _FRESH  # measurements, after which a step without drafts is tried before others
_USUAL = 1.25  # times what steps took, in both directions
_PRIOR_WEIGHT = 0.02  # of the default costs' ratios, against one measurement
_OUTLIER = 0.15  # a relative error at which a measurement counts half
_ROUNDS = 4  # of reweighting
_EVERY = 32  # measurements between two fits, once there are as many
_LATE = 0.2  # share of steps with answers and prompts that may take longer than they should
_MOST_MARGIN = 1.3  # outliers shall not stop prompts
_ENOUGH = 8  # measurements of such steps, to say how long the longer ones take


@dataclass(frozen=True)
class Load:
    """What a step computes: rows by kind, and the keys that they attend, summed over rows."""

    few: int = 0
    few_keys: int = 0
    many: int = 0
    many_keys: int = 0

    def features(self) -> tuple[float, ...]:
        """In the order of costs: a pass for few rows, a few row, a pass for many, a row of many, a key of each."""
        return (self.few > 0, self.few, self.many > 0, self.many, self.few_keys, self.many_keys)

    def size_class(self) -> tuple[int, ...]:
        """Loads that differ by less than a factor of two in each respect."""
        return (self.few.bit_length(), self.many.bit_length(), (self.few_keys + self.many_keys).bit_length())


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
        self._few_times: dict[int, deque[float]] = {}  # of steps of few rows alone, by their number, without keys
        self._paces: deque[float] = deque(maxlen=_LATEST)  # what the latest of them took, of others of as many rows
        self._usual_at = 0  # which measurement was the last of the usual pace
        self._few_curve: list[float] = []  # what `_curves` gave lately
        self._hoped_curve: list[float] = []
        self._may_draft: dict[tuple[int, int], bool] = {}  # what `may_draft` found with these curves
        self._choices, self._to_lose_s = 0, 0.0  # seconds that were not lost so far
        self._tried, self._tries = _TRIED, False  # the share, and whether the last choice was such a number
        self._measured_at: dict[int, int] = {}  # for each of these numbers, which measurement was the last
        self._margin = 1.0  # what the longer ones of steps with answers and prompts took, of what the costs say

    def seconds(self, load: Load) -> float:
        """Expected for a step."""
        return sum(cost * feature for cost, feature in zip(self.costs, load.features()))

    def row_seconds(self, load: Load) -> float:
        """What the rows and keys of a load add to a step that has rows of both kinds in any case."""
        return self.seconds(load) - (load.few > 0) * self.costs[0] - (load.many > 0) * self.costs[2]

    def prompt_rows(self, load: Load, step_s: float, depth: int = 0, most: int = 1 << 20) -> int:
        """How many prompt rows, the first at position `depth`, fit into a step of `step_s` beside this load.

        Most such steps then take less: of those measured, all but a fifth. A multiple of a page, at least one: prompts
        go on, however slow the device is.
        """
        _, _, base, row, _, key = self.costs
        left = step_s / self._margin - self.seconds(load) - (0.0 if load.many else base)
        # n rows cost n row + (n depth + n (n + 1) / 2) key.
        linear, rows = row + key * (depth + 0.5), float(most)
        if left <= 0:
            return min(PAGE, most)
        if key > 0:
            rows = (math.sqrt(linear * linear + 2 * key * left) - linear) / key
        elif linear > 0:
            rows = left / linear
        return min(most, max(PAGE, int(min(rows, most)) // PAGE * PAGE))

    def few_rows_for(self, many: int) -> int:
        """How many few rows cost what so many rows of a prompt do, at least one."""
        few, row = self.costs[1], self.costs[3]
        return max(1, min(many, int(many * row / few) if few > 0 else many))

    def few_seconds(self, load: Load, most: int = 0) -> float:
        """Expected for a step that has few rows alone; steps of up to `most` rows are in the curves then."""
        if max(load.few, most) >= len(self._few_curve):
            self._few_curve, self._hoped_curve = self._curves(max(load.few, most) + 1)
        return self._few_curve[load.few] + self.costs[4] * load.few_keys

    def may_draft(self, load: Load, most: int) -> bool:
        """Whether up to `most` drafted tokens, all of which stand, may be worth their rows, keys aside."""
        self.few_seconds(load, load.few + most)
        may = self._may_draft.get((load.few, most))
        if may is None:
            tokens = range(load.few, load.few + most + 1)
            may = self._may_draft[load.few, most] = _fastest(tokens, self._hoped_curve[load.few :]) > 0
        return may

    def draft_rows(self, load: Load, gains: Many[float]) -> int:
        """How many drafted tokens to check in a step of this load, which has few rows alone.

        Each is one row more. They stand with the probabilities `gains`, the largest first; it is the number that makes
        the most tokens a second.
        """
        return self._choose(load, gains, 1, 0.0)

    def draft_length(self, load: Load, rates: Many[float], token_s: float, most: int) -> int:
        """How many tokens, up to `most`, a draft model should propose to each of some answers of this load.

        Each of its tokens stands with the answer's rate if those before it do; one of each answer takes it `token_s`.
        It is the number that makes the most tokens a second, 0 where none does.
        """
        gains = [sum(rate**length for rate in rates) for length in range(1, most + 1)]
        return self._choose(load, gains, len(rates), token_s)

    def _choose(self, load: Load, gains: Many[float], rows: int, draft_s: float) -> int:
        """How many drafts make the most tokens a second: each gains tokens, takes `rows` rows, and `draft_s` to make.

        One call in `_TRY_EVERY` looks for a number that may be better, where not much is lost by trying it: of several
        the one that may make most. Where drafts have been tried in vain, less may be lost.
        """
        self.few_seconds(load, load.few + len(gains) * rows)
        tokens = list(itertools.accumulate(gains, initial=float(load.few)))
        key_s = self.costs[4] * load.few_keys / load.few
        more = [load.few * key_s + (rows * key_s + draft_s) * number for number in range(len(tokens))]
        expected = list(map(operator.add, self._few_curve[load.few :: rows], more))
        best = _fastest(tokens, expected)
        if best:
            self._tried = _TRIED
        elif self._tries:
            self._tried = max(_LEAST_TRIED, _LESS * self._tried)
        self._choices, self._tries = self._choices + 1, False
        if self._choices % _TRY_EVERY or not self._usual:
            return best
        hoped = list(map(operator.add, self._hoped_curve[load.few :: rows], more))
        speed = tokens[best] / expected[best]
        better = speed if best else _WORTH * speed
        self._to_lose_s = min(self._to_lose_s + _TRY_EVERY * self._tried * expected[best], _MOST_LOST * expected[best])
        others = [
            (tokens[number] / hoped[number], number, lost_s)
            for number, made in enumerate(tokens)
            if number != best and made > better * hoped[number]
            if (lost_s := max(0.0, expected[number] - made / speed)) <= self._to_lose_s
        ]
        old = self._count - self._measured_at.get(load.few, -_OLD) >= _OLD
        if best and old and tokens[0] > better * hoped[0]:
            others = [one for one in others if one[1] == 0]
        if others:
            _, best, lost_s = max(others)
            self._to_lose_s, self._tries = self._to_lose_s - lost_s, True
        return best

    def _curves(self, size: int) -> tuple[list[float], list[float]]:
        """Seconds of steps of 0 to `size` - 1 few rows, without keys: those expected, and those hoped for.

        Kernels compute rows in blocks, so that these times have steps. A number that was not measured is expected on
        the line between the next smaller and the next larger one that were, or follows the costs where one of them is
        missing. What may be hoped for, if it was not measured lately, is the time of a smaller number, as of one block,
        and no more rows a second than the best of the larger numbers has.
        """
        known = [rows for rows in sorted(self._few_times) if rows < size]
        medians = {rows: median_low(self._few_times[rows]) for rows in known}
        costs = [max(self.costs[0] + rows * self.costs[1], _LEAST_S) for rows in range(size)]
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
        """A step of this load took so long."""
        if not self._learn or not (load.few or load.many) or not 0 < seconds < math.inf:
            return
        kept = self._measured.setdefault(load.size_class(), deque(maxlen=_KEPT))
        kept.append((load.features(), seconds))
        if not load.many:
            seconds_alone = seconds * self.seconds(Load(few=load.few)) / self.seconds(load)
            self._observe_few(load.few, max(_LEAST_S, seconds_alone))
        self._count += 1
        if self._count % _NEW_CURVES == 0:
            self._few_curve, self._may_draft = [], {}
        if self._count % _EVERY == 0 or self._count & (self._count - 1) == 0:
            self._fit()

    def _observe_few(self, rows: int, seconds: float) -> None:
        """A step of few rows took so long, without keys.

        While steps take longer or shorter than they did, whatever their number of rows, their times stay what they are,
        so that those of some numbers are not compared with those of others at another speed. If that lasts, all change
        alike.
        """
        lately = self._count - self._measured_at.get(rows, -_FRESH) < _FRESH
        if rows in self._few_times and (lately or not self._usual):
            self._paces.append(seconds / median_low(self._few_times[rows]))
            self._measured_at[rows] = self._count
        if self._usual:
            if not lately:
                self._few_times[rows] = deque(maxlen=_LATEST)
            self._few_times[rows].append(seconds)
            self._measured_at[rows] = self._usual_at = self._count
        elif self._count - self._usual_at >= _FRESH:
            pace = median_low(self._paces)
            self._few_times = {
                rows: deque((pace * one for one in times), maxlen=_LATEST) for rows, times in self._few_times.items()
            }
            self._paces.clear()

    @property
    def _usual(self) -> bool:
        """Whether the latest steps took about what others of as many rows had taken."""
        return not self._paces or 1 / _USUAL < median_low(self._paces) < _USUAL

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
        if mixed.sum() >= _ENOUGH:
            late = float(np.quantile(1 / (rows @ fit)[mixed], 1 - _LATE))
            self._margin = min(max(1.0, late), _MOST_MARGIN)


def _fastest(tokens: Many[float], seconds: list[float]) -> int:
    """Which step makes the most tokens a second: the first, without drafts, unless others make `_WORTH` times them."""
    best, speed = 0, _WORTH * tokens[0] / seconds[0]
    for number in range(1, len(tokens)):
        if tokens[number] > speed * seconds[number]:
            best, speed = number, tokens[number] / seconds[number]
    return best


def _positive_fit(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin over x >= 0 of sum of weights (rows x - 1)^2 + prior weight * |x - 1|^2; drops what would be negative."""
    size = rows.shape[1]
    left, right = (rows.T * weights) @ rows + _PRIOR_WEIGHT * np.eye(size), (rows.T * weights).sum(1) + _PRIOR_WEIGHT
    active = np.ones(size, bool)
    while True:
        fit = np.zeros(size)
        fit[active] = np.linalg.solve(left[np.ix_(active, active)], right[active])
        if (fit >= 0).all():
            return fit
        active &= fit > 0
