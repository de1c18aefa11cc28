"""`--require "kld<=0.03,top1>=0.92"`: limits of measured quality."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mlcpipe.bundle.quality import Comparison, QualityInfo
from mlcpipe.errors import QualityError, UsageError

NAMES = tuple(name for name in Comparison.model_fields if name != "tokens" and not name.endswith("_error"))


@dataclass(frozen=True)
class Requirement:
    """An upper limit, or a lower one, of a number of `Comparison`, for prefill and for decode."""

    name: str
    upper: bool
    limit: float

    def __str__(self) -> str:
        return f"{self.name}{'<=' if self.upper else '>='}{self.limit:g}"

    def holds(self, comparison: Comparison) -> bool:
        """Whether the number is within the limit."""
        value = getattr(comparison, self.name)
        return bool(value <= self.limit if self.upper else value >= self.limit)


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Raises UsageError for anything but `NAME<=NUMBER` and `NAME>=NUMBER` with commas between."""
    return tuple(_parse(part.strip()) for part in text.split(",")) if text else ()


def _parse(part: str) -> Requirement:
    found = re.fullmatch(r"([a-z0-9_]+)\s*(<=|>=)\s*([0-9.eE+-]+)", part)
    try:
        limit = float(found[3]) if found else math.nan
    except ValueError:
        limit = math.nan
    if found is None or not math.isfinite(limit):
        raise UsageError("--require", expected="such as kld<=0.03,top1>=0.92", found=repr(part)[:80])
    if found[1] not in NAMES:
        raise UsageError("--require", expected=", ".join(NAMES), found=repr(found[1])[:80])
    return Requirement(found[1], found[2] == "<=", limit)


def check(quality: QualityInfo, requirements: tuple[Requirement, ...]) -> None:
    """Raises QualityError for the first limit that prefill or decode exceeds."""
    for requirement in requirements:
        for kind, comparison in (("prefill", quality.prefill), ("decode", quality.decode)):
            if not requirement.holds(comparison):
                raise QualityError(
                    f"the {kind} of the bundle does not fulfil --require",
                    expected=requirement,
                    found=f"{getattr(comparison, requirement.name):.4g} on {comparison.tokens} tokens",
                    next_step="use a quantization with more bits, or another limit",
                )
