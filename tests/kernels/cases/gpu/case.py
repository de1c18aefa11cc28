"""What a kernel case for GPUs is: functions, calls of them with data, and bounds of what they must leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.passes.schedule_kernels import first_rule
from mlcpipe.quantization.layout import Layout, load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.support.defaults import SEARCH
from tests.kernels.cases.cpu.matmul import random_parts, scheme_named
from tir_schedules.rule import rules_in

Array = NDArray[Any]
Knobs = Mapping[str, int | str]
LAYOUT, ROW_WORDS = (
    load_layout("rows32_pairs"),
    load_layout("row_words"),
)  # of weights, and of tables with gathered rows


@dataclass(frozen=True)
class Call:
    """One call of a case's function: its arguments, outputs among them, and a check of all tensors afterwards."""

    args: tuple[Array | int | float, ...]
    check: Callable[[list[Array]], None]
    function: str = "main"


class Case(Protocol):
    """A kernel with data. Outputs start as NaN or -1, so that an element that is not written shows."""

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        """The scheduled functions for a target's facts, by the names that calls use."""

    def calls(self) -> Sequence[Call]:
        """Independent calls."""


def by_rules(definition: tirx.PrimFunc, knobs: Knobs) -> tirx.PrimFunc:
    """A definition as the first rule that takes it schedules it."""
    return first_rule(rules_in("gpu"), definition, knobs)[1]


def packed_weight(
    scheme_name: str, n: int, k: int, experts: int = 0, layout: Layout = LAYOUT
) -> tuple[list[Array], Array]:
    """Packed arrays of a random weight, and what they hold."""
    scheme, rng = scheme_named(scheme_name), np.random.default_rng(n + k)
    shape = (experts, n, k) if experts else (n, k)
    if scheme.kept:
        # Products of a gate and its factors that float16 holds.
        rows = random_parts(scheme, (math.prod(shape[:-1]), k), rng, 2.0**-10 if scheme.super_size else 2.0**-5)
    else:
        rows = pack(scheme, rng.standard_normal(shape).astype(np.float32).reshape(-1, k), method=SEARCH)
    whole = unpack(scheme, rows, k).reshape(shape)
    packed = {name: a.reshape(*shape[:-1], -1) for name, a in rows.items()}
    return list(layout.repack(scheme, packed, n, k).values()), whole


def assert_near(found: Array, expected: Array, tolerance: float) -> None:
    """Within a share of the largest expected number."""
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())
