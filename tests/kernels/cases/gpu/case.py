"""What a kernel case for GPUs is: functions, calls of them with data, and bounds of what they must leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.passes.schedule_kernels import first_rule
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import load_scheme
from tir_schedules.rule import rules_in

Array = NDArray[Any]
Knobs = Mapping[str, int | str]
LAYOUT = load_layout("rows32_pairs")


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


def packed_weight(scheme_name: str, n: int, k: int, experts: int = 0) -> tuple[list[Array], Array]:
    """Packed arrays of a random weight, and what they hold."""
    scheme, rng = load_scheme(scheme_name), np.random.default_rng(n + k)
    lead = (experts,) if experts else ()
    w = rng.standard_normal((*lead, n, k)).astype(np.float32)
    rows = pack(scheme, w.reshape(-1, k))
    whole = unpack(scheme, rows, k).reshape(w.shape)
    packed = {name: a.reshape(*lead, n, -1) for name, a in rows.items()}
    return list(LAYOUT.repack(scheme, packed, n, k).values()), whole


def assert_near(found: Array, expected: Array, tolerance: float) -> None:
    """Within a share of the largest expected number."""
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())
