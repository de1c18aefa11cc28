"""Every kernel of the list against numpy in float64, and every definition with the fallback schedule likewise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.conftest import OPTIMIZED
from tests.kernels.cases.cpu import CASES, library
from tests.kernels.cases.cpu.int8 import HERE
from tests.kernels.cases.cpu.matmul import INTEGERS, KEPT, MORE
from tests.kernels.cases.cpu.page_attention import SHAPES, library_of
from tests.kernels.harness import Case, assert_outputs, functions_of, link_together
from tests.once import Once

Kernels = Callable[..., Any]

# In `make test`: one case for each kernel of these libraries; test_int8.py has integer dot products. All definitions go the way of those of `q4f16_1`.
# LLVM optimizes kernels of these as users' are, and of the sizes of real models; test_qemu.py and test_alone.py have
# others. That takes most of a library's time: the other libraries have it in `make test-optimized` alone.
FAST_LIBRARIES = (
    "q4f16_1",
    "norm",
    "pages_h8_kv4_d64_float16_c0",
    "pages_h4_kv4_d80_q8_c5",
    "timed-sampling",
    "adapters",
    "short_conv",
    "gated_delta",
    "ssm_scan",
)
# Of these LLVM makes no other kind of code than of the rest.
PLAIN = ("pages_h4_kv4_d80_q8_c5", "gated_delta")
FAST = {case.kernel.symbol: case for case in reversed(CASES) if case.library in FAST_LIBRARIES}
# Of integer dot products all kernels of the best one; test_qemu.py runs some of the others, with adapters too.
OTHERS = (MORE, *(f"{kind}-{dot}" for kind in ("int8", "adapted") for dot in HERE[1:]))
# Two of three shapes of attention, of block formats and of the sizes of real models' attention, and half of the formats of
# integers are in `make test-everything` alone.
SELDOM = {*map(library_of, SHAPES), *KEPT, *INTEGERS} - {*map(library_of, SHAPES[::3]), *KEPT[::3], *INTEGERS[::2]}
TIMED_PAGES = list(dict.fromkeys(case.library for case in CASES if case.library.startswith("timed-pages")))
SELDOM |= {*TIMED_PAGES} - {*TIMED_PAGES[::3]}
SELDOM -= {*FAST_LIBRARIES}
# Cases that share a kernel are one test: thousands of them would take longer to report than to run.
CASES_OF: dict[tuple[str, str], list[Case]] = defaultdict(list)
for one in CASES:
    CASES_OF[one.library, one.kernel.symbol].append(one)
# A definition takes milliseconds to write, and thousands of cases share hundreds of kernels.
WITHOUT = {kernel for kernel in {case.kernel for case in CASES} if kernel.definition() is None}
DEFINED_OF = {key: cases for key, cases in CASES_OF.items() if cases[0].kernel not in WITHOUT and not cases[0].timed}


def parameters(cases_of: Mapping[tuple[str, str], list[Case]]) -> list[Any]:
    """The cases of each kernel."""
    seldom = {name for name, _ in cases_of if name.endswith(OTHERS) or name in SELDOM}
    return [
        pytest.param(cases, id=symbol, marks=pytest.mark.everything if name in seldom else ())
        for (name, symbol), cases in cases_of.items()
    ]


@pytest.fixture(scope="session")
def kernels(once: Once) -> Kernels:
    """The functions of a library of cases, compiled once for all of pytest's workers."""

    @cache
    def load(name: str, definitions: bool = False) -> Any:
        def work(folder: Path) -> object:
            fast = name.startswith((*FAST_LIBRARIES, "timed-")) and name not in PLAIN
            optimized = OPTIMIZED or (not definitions and fast)
            return link_together(functions_of(library(name), definitions=definitions), folder, optimized=optimized)

        path, names = once(f"cpu-{name}-{'definitions' if definitions else 'kernels'}", work)
        loaded = tvm.runtime.load_module(path)
        return {symbol: loaded[first] for symbol, first in names.items()}

    return load


@pytest.mark.parametrize("case", FAST.values(), ids=lambda case: case.name)
def test_kernel_is_numpy(case: Case, kernels: Kernels) -> None:
    assert_outputs(kernels(case.library)[case.kernel.symbol], case.call())


@pytest.mark.full
@pytest.mark.parametrize("cases", parameters(CASES_OF))
def test_kernel_is_numpy_in_every_call(cases: list[Case], kernels: Kernels) -> None:
    check(cases, kernels(cases[0].library))


@pytest.mark.parametrize(
    "case", [case for case in FAST.values() if case.library == "q4f16_1"], ids=lambda case: case.name
)
def test_definition_is_numpy(case: Case, kernels: Kernels) -> None:
    assert_outputs(kernels(case.library, True)[case.kernel.symbol], case.call())


@pytest.mark.full
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.everything)])
@pytest.mark.parametrize("cases", parameters(DEFINED_OF))
def test_definition_is_numpy_in_some_calls(cases: list[Case], every: int, kernels: Kernels) -> None:
    check(cases[::every], kernels(cases[0].library, True))


def check(cases: list[Case], functions: Mapping[str, Any]) -> None:
    """As `assert_outputs`; the error has the name of a case."""
    for case in cases:
        try:
            assert_outputs(functions[case.kernel.symbol], case.call())
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from error


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
