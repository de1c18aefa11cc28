"""All kernel cases for CPUs: correctness (`test_cpu_cases.py`) and speed (`bench.kernels`) read the same list."""

from __future__ import annotations

from tests.kernels.cases.cpu import (
    adapters,
    gated_delta,
    int8,
    matmul,
    norm,
    page_attention,
    rwkv,
    sampling,
    short_conv,
    ssm_scan,
)
from tests.kernels.harness import Case

CASES: tuple[Case, ...] = (
    *matmul.cases(),
    *int8.cases(),
    *norm.cases(),
    *page_attention.cases(),
    *sampling.cases(),
    *adapters.cases(),
    *gated_delta.cases(),
    *short_conv.cases(),
    *rwkv.cases(),
    *ssm_scan.cases(),
)


def library(name: str) -> list[Case]:
    """The cases whose kernels compile together."""
    return [case for case in CASES if case.library == name]
