"""Decides whether a choice is faster than the default, or only noise.

Measurements of default and candidate are interleaved (A B A B ...), so a temporary slowdown affects both; each pair
gives a ratio A / B. The search uses the median of few ratios. The final decision uses new pairs, since the best of many
noisy numbers is biased: the lower quartile of the ratios must exceed MARGIN.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 1.02
MIN_PAIRS = 8  # fewer give no meaningful quartile

Pairs = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Verdict:
    """Statistics of pairs of seconds (default, candidate); `wins` is the test that a record must pass."""

    default_s: float
    candidate_s: float
    ratio: float
    quartile: float
    pairs: int

    @property
    def wins(self) -> bool:
        return self.pairs >= MIN_PAIRS and self.quartile > MARGIN


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
