"""Every kernel of the list against numpy in float64, and every definition with the fallback schedule likewise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
FAST = {case.kernel.symbol: case for case in reversed(CASES) if case.library in FAST_LIBRARIES}
# Of integer dot products all kernels of the best one; test_qemu.py runs some of the others, with adapters too.
OTHERS = (MORE, *(f"{kind}-{dot}" for kind in ("int8", "adapted") for dot in HERE[1:]))
# Two of three shapes of attention and of block formats, half of the formats of integers, and one in three of the sizes of
# real models' attention are in `make test-everything` alone.
SELDOM = {*map(library_of, SHAPES), *KEPT, *INTEGERS} - {*map(library_of, SHAPES[::3]), *KEPT[::3], *INTEGERS[::2]}
SELDOM |= {*list(dict.fromkeys(case.library for case in CASES if case.library.startswith("timed-pages")))[1::3]}
SELDOM -= {*FAST_LIBRARIES}
PARAMETERS = [
    pytest.param(
        case,
        id=case.name,
        marks=pytest.mark.everything if case.library.endswith(OTHERS) or case.library in SELDOM else (),
    )
    for case in CASES
]
# A definition takes milliseconds to write, and thousands of cases share hundreds of kernels.
WITHOUT = {kernel for kernel in {case.kernel for case in CASES} if kernel.definition() is None}
DEFINED = [one for case, one in zip(CASES, PARAMETERS) if case.kernel not in WITHOUT and not case.timed]
FAST_DEFINED = [case.name for case in FAST.values() if case.library == "q4f16_1"]


@pytest.fixture(scope="session")
def kernels(once: Once) -> Kernels:
    """The functions of a library of cases, compiled once for all of pytest's workers."""

    @cache
    def load(name: str, definitions: bool = False) -> Any:
        def work(folder: Path) -> object:
            optimized = OPTIMIZED or (not definitions and name.startswith((*FAST_LIBRARIES, "timed-")))
            return link_together(functions_of(library(name), definitions=definitions), folder, optimized=optimized)

        path, names = once(f"cpu-{name}-{'definitions' if definitions else 'kernels'}", work)
        loaded = tvm.runtime.load_module(path)
        return {symbol: loaded[first] for symbol, first in names.items()}

    return load


@pytest.mark.parametrize("case", PARAMETERS)
@pytest.mark.fast_cases(*(case.name for case in FAST.values()))
def test_kernel_is_numpy(case: Case, kernels: Kernels) -> None:
    assert_outputs(kernels(case.library)[case.kernel.symbol], case.call())


@pytest.mark.parametrize("case", DEFINED)
@pytest.mark.fast_cases(*FAST_DEFINED)
@pytest.mark.full_cases(*(one.id for one in DEFINED[::4]))
def test_definition_is_numpy(case: Case, kernels: Kernels) -> None:
    assert_outputs(kernels(case.library, True)[case.kernel.symbol], case.call())


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
