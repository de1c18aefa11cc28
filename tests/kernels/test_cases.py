"""Every kernel of the list against numpy in float64, and every definition with the fallback schedule likewise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from .cases import CASES, library
from .harness import Case, assert_outputs, compile_kernels

DEFINED = [case for case in CASES if case.kernel.definition() is not None and not case.timed]


@cache
def kernels(name: str) -> Mapping[str, Any]:
    return compile_kernels(library(name))


@cache
def fallbacks(name: str) -> Mapping[str, Any]:
    return compile_kernels(library(name), definitions=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_is_numpy(case: Case) -> None:
    assert_outputs(kernels(case.library)[case.kernel.symbol], case.call())


@pytest.mark.parametrize("case", DEFINED, ids=lambda case: case.name)
def test_definition_is_numpy(case: Case) -> None:
    assert_outputs(fallbacks(case.library)[case.kernel.symbol], case.call())


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
