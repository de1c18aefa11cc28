"""Interleaved measurement, in the worker process, of a kernel's default and other knobs, with cold weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.compiler.backends.base import Runner
from mlcpipe.errors import CompileError
from mlcpipe.host.bandwidth import last_cache_bytes
from mlcpipe.targets import Target
from mlcpipe.tuned.kernels import apply_rule
from mlcpipe.tuning.inputs import Inputs
from tir_schedules.rule import Declined, Knobs

Array = NDArray[Any]
COLD_CACHES = 8  # a last-level cache may keep part of data that barely exceeds it
UNKNOWN_CACHE = 32 << 20
_MAX_COPIES, _MAX_BYTES = 256, 1 << 30
HALF_S = 2e-3  # of a pair: long enough for the clock and several calls
TOLERANCE = 2e-3  # of the largest output: only the order of sums differs, not the rounding of inputs


class Bench:
    """One row range of one kernel: its default, and argument sets that exceed all caches if it reads weights or
    the KV cache."""

    def __init__(
        self, runner: Runner, target: Target, rule: str, func: tirx.PrimFunc, inputs: Inputs, knobs: Knobs
    ) -> None:
        self._runner, self._target, self._rule, self._func, self._knobs = runner, target, rule, func, knobs
        self.nbytes, self._outputs = inputs.nbytes, inputs.outputs
        self._argument_sets = [
            [runner.tensor(x) if isinstance(x, np.ndarray) else x for x in inputs.values]
            for _ in range(copies_of(inputs, _MAX_COPIES, _MAX_BYTES))
        ]
        self._next = 0
        self._default = self._build({})
        self._expected = self._results(self._default)
        self._calls = 1
        self._calls = max(1, math.ceil(HALF_S / max(self._time(self._default), 1e-7)))

    def pairs(self, choice: Mapping[str, int], count: int) -> list[tuple[float, float]]:
        """Interleaved seconds of the default and a choice. Raises CompileError if their outputs differ."""
        candidate = self._build(choice)
        outputs = zip(self._results(candidate), self._expected)
        check_outputs((float(np.abs(a - b).max()), float(np.abs(b).max())) for a, b in outputs)
        for function in (self._default, candidate):
            self._time(function)
        return [(self._time(self._default), self._time(candidate)) for _ in range(count)]

    def close(self) -> None:
        """Nothing to close: it only holds tensors."""

    def _build(self, choice: Mapping[str, int]) -> Any:
        return self._runner.build(scheduled(self._target, self._rule, self._func, {**self._knobs, **choice}))

    def _results(self, function: Any) -> list[Array]:
        """The outputs of a function."""
        function(*self._argument_sets[0])
        written: list[Any] = [self._argument_sets[0][index] for index in self._outputs]
        return [tensor.numpy().astype(np.float64) for tensor in written]

    def _time(self, function: Any) -> float:
        first, self._next = self._next, self._next + self._calls
        argument_sets = [self._argument_sets[i % len(self._argument_sets)] for i in range(first, first + self._calls)]
        return self._runner.seconds(function, argument_sets)


def scheduled(target: Target, rule: str, func: tirx.PrimFunc, knobs: Knobs) -> tirx.PrimFunc:
    """The kernel that a rule makes with these knobs. Raises CompileError if it declines."""
    kernel = apply_rule(target, rule, func, knobs)
    if isinstance(kernel, Declined):
        raise CompileError("the rule declined", found=kernel.reason)
    return kernel


def check_outputs(apart: Iterable[Sequence[float]]) -> None:
    """Raise CompileError if a candidate is wrong, by each output's largest difference and largest number."""
    for difference, largest in apart:
        if not 0 <= difference <= TOLERANCE * largest:
            expected = f"within {TOLERANCE * largest:.3g}"
            raise CompileError("the candidate's outputs differ", expected=expected, found=difference)


def copies_of(inputs: Inputs, max_copies: int, max_bytes: int) -> int:
    """How many copies of the arguments to cycle through."""
    if not inputs.cold:
        return 1
    copies = min(-(-COLD_CACHES * (last_cache_bytes() or UNKNOWN_CACHE) // inputs.nbytes), max_copies)
    return max(1, min(copies, max_bytes // inputs.nbytes))
