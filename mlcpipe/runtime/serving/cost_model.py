"""How long a step takes, learned from the steps that were."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tir_schedules.step_layout import PAGE

# Before the first measurement: a model of 0.5 GB on two cores, in seconds.
DEFAULT_COSTS = (20e-3, 2e-3, 20e-3, 1.5e-3, 0.5e-6, 0.2e-6)
_WORTH = 1.05  # times the tokens a second without drafts
_TRIED = 0.01  # share of the time of answers that may be lost to find out how long other numbers of rows take
_SOME = 3  # measurements, before which a long time may be chance
_KEPT = 12  # measurements of a class of sizes
_LATEST = 5  # measurements of a number of few rows: three new ones are most of them
_FORGOTTEN = 16  # measurements in which such a number is to be measured again, or only their median is kept
_PRIOR_WEIGHT = 0.02  # of the default costs' ratios, against one measurement
_OUTLIER = 0.15  # a relative error at which a measurement counts half
_ROUNDS = 4  # of reweighting
_EVERY = 32  # measurements between two fits, once there are as many
_SLOWER = 2.0  # how many times longer steps may have taken for a while
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
        self._few_curve: list[float] = []  # what `_curves` gave lately
        self._hoped_curve: list[float] = []
        self._to_lose_s = 0.0  # that were not lost so far
        self._known: set[int] = set()  # numbers that were measured `_SOME` times
        self._lately: set[int] = set()  # numbers that were measured since times were last forgotten
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
        """Whether up to `most` drafted tokens, all of which stand, may be worth their rows in a step of this load."""
        tokens = range(load.few, load.few + most + 1)
        return _fastest(tokens, self._step_seconds(load, most)[1]) > 0

    def draft_rows(self, load: Load, gains: Many[float]) -> int:
        """How many drafted tokens to check in a step of this load, which has few rows alone.

        Each is one row more. They stand with the probabilities `gains`, the largest first; it is the number that makes
        the most tokens a second.
        """
        tokens = list(itertools.accumulate(gains, initial=float(load.few)))
        return self._choose(tokens, *self._step_seconds(load, len(gains)))

    def draft_length(self, load: Load, rates: Many[float], token_s: float, most: int) -> int:
        """How many tokens, up to `most`, a draft model should propose to each of some answers of this load.

        Each of its tokens stands with the answer's rate if those before it do; one of each answer takes it `token_s`.
        It is the number that makes the most tokens a second, 0 where none does.
        """
        gains = (sum(rate**length for rate in rates) for length in range(1, most + 1))
        tokens = list(itertools.accumulate(gains, initial=float(load.few)))
        return self._choose(tokens, *self._step_seconds(load, most, len(rates), token_s))

    def _step_seconds(self, load: Load, most: int, rows: int = 1, draft_s: float = 0.0) -> tuple[list[float], ...]:
        """Seconds, expected and hoped for, of steps with 0 to `most` drafts of so many rows, each made in `draft_s`."""
        self.few_seconds(load, load.few + most * rows)
        key_s = self.costs[4] * load.few_keys / load.few
        steps = [(load.few + drafts * rows, drafts * draft_s) for drafts in range(most + 1)]
        return tuple(
            [curve[count] + count * key_s + seconds for count, seconds in steps]
            for curve in (self._few_curve, self._hoped_curve)
        )

    def _choose(self, tokens: Many[float], expected: list[float], hoped: list[float]) -> int:
        """Which step makes the most tokens a second; or, where not much is lost by trying it, one that may make more.

        Of several it is the one with least to lose.
        """
        best = _fastest(tokens, expected)
        speed = tokens[best] / expected[best]
        better = speed if best else _WORTH * speed
        self._to_lose_s = min(self._to_lose_s + _TRIED * expected[best], expected[best])
        others = [
            (max(0.0, expected[number] - tokens[number] / speed), number)
            for number in range(len(tokens))
            if number != best and tokens[number] > better * hoped[number]
        ]
        lost_s, other = min(others, default=(math.inf, best))
        if lost_s > self._to_lose_s:
            return best
        self._to_lose_s -= lost_s
        return other

    def _curves(self, size: int) -> tuple[list[float], list[float]]:
        """Seconds of steps of 0 to `size` - 1 few rows, without keys: those expected, and those hoped for.

        Kernels compute rows in blocks, so that these times have steps. A number that is not known is expected on the
        line between the next smaller and the next larger one that are, or follows the costs where there is no larger
        one. Hope is that it is of the same block as the smaller one; and where all but one time was forgotten, that
        this was a slow moment. A shorter time is believed.
        """
        medians = [_median(self._few_times.get(rows, ())) for rows in range(size)]
        costs = [self.costs[0] + rows * self.costs[1] for rows in range(size)]
        known = [rows for rows in sorted(self._known) if rows < size]
        scale, block = 1.0, math.inf
        expected: list[float] = []
        hoped: list[float] = []
        for rows, median in enumerate(medians):
            if rows in self._known:
                scale = median / costs[rows]
            expected.append(min(scale * costs[rows], median))
            if rows not in self._known:
                hoped.append(min(block, expected[rows]))
            elif len(self._few_times[rows]) >= _SOME:
                block = median
                hoped.append(median)
            else:
                hoped.append(min(block, median / _SLOWER))
        for smaller, larger in itertools.pairwise(known):
            row_s = (medians[larger] - medians[smaller]) / (larger - smaller)
            for rows in range(smaller + 1, larger):
                expected[rows] = min(medians[smaller] + (rows - smaller) * row_s, medians[rows])
        return expected, hoped

    def observe(self, load: Load, seconds: float) -> None:
        """A step of this load took so long."""
        if not self._learn or not (load.few or load.many) or not 0 < seconds < math.inf:
            return
        kept = self._measured.setdefault(load.size_class(), deque(maxlen=_KEPT))
        kept.append((load.features(), seconds))
        if not load.many:
            times = self._few_times.setdefault(load.few, deque(maxlen=_LATEST))
            times.append(seconds * self.seconds(Load(few=load.few)) / self.seconds(load))
            self._lately.add(load.few)
            if len(times) >= _SOME:
                self._known.add(load.few)
        self._count += 1
        if self._count % _SOME == 0:
            self._few_curve = []
        if self._count % _FORGOTTEN == 0:
            self._forget()
        if self._count % _EVERY == 0 or self._count & (self._count - 1) == 0:
            self._fit()

    def _forget(self) -> None:
        """All times but the median of numbers of rows that were not tried lately: a slow moment shall not last."""
        for rows in self._few_times.keys() - self._lately:
            times = self._few_times[rows]
            self._few_times[rows] = deque([_median(times)], maxlen=_LATEST)
        self._lately.clear()

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


def _median(values: Collection[float]) -> float:
    """The larger of two; infinite of none."""
    return sorted(values)[len(values) // 2] if values else math.inf


def _fastest(tokens: Many[float], seconds: list[float]) -> int:
    """Which of steps makes the most tokens a second: the first, without drafts, unless another makes `_WORTH` times as
    many."""
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
