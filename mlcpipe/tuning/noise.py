"""Whether a choice is faster than the default, or only looks so.

Default and candidate are measured by turns (A B A B ...), so that what slows a machine for a while slows both: a pair
gives the ratio A / B of two measurements one after the other. The search takes the median of few ratios. Whether the
best of many candidates stays is decided on new pairs, since the best of many noisy numbers is too good: the lower
quartile of the ratios must be above MARGIN.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.02
LEAST_PAIRS = 8  # fewer have no quartile worth the name

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """What pairs of seconds (default, candidate) say; `wins` is the test that a record must pass."""

    default_s: float
    candidate_s: float
    ratio: float
    quartile: float
    pairs: int

    @property
    def wins(self) -> bool:
        return self.pairs >= LEAST_PAIRS and self.quartile > MARGIN


def judge(pairs: Pairs) -> Verdict:
    """The medians of both, of their ratio, and the ratio's lower quartile. `pairs` has two or more."""
    ratios = [default / candidate for default, candidate in pairs]
    return Verdict(
        default_s=statistics.median(default for default, _ in pairs),
        candidate_s=statistics.median(candidate for _, candidate in pairs),
        ratio=statistics.median(ratios),
        quartile=statistics.quantiles(ratios, n=4, method="inclusive")[0],
        pairs=len(ratios),
    )
