"""All kernel cases: correctness (`test_cases.py`) and speed (`bench.py`) read the same list."""

from __future__ import annotations

from . import attention_cases, int8_cases, matmul_cases, norm_cases, sampling_cases
from .harness import Case

CASES: tuple[Case, ...] = (
    *matmul_cases.cases(),
    *int8_cases.cases(),
    *norm_cases.cases(),
    *attention_cases.cases(),
    *sampling_cases.cases(),
)


def library(name: str) -> list[Case]:
    """The cases whose kernels compile together."""
    return [case for case in CASES if case.library == name]
