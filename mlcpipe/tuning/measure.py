"""Measuring in the worker process: a kernel with its default knobs and with others, by turns, with cold weights."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.bandwidth import last_cache_bytes
from mlcpipe.compiler.cuda.build import fat_binary
from mlcpipe.compiler.cuda.build import register as register_cuda
from mlcpipe.compiler.cuda.nvrtc import find_nvrtc
from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.spirv import build as spirv
from mlcpipe.errors import CompileError
from mlcpipe.passes.pipeline import lower_for_llvm
from mlcpipe.runtime import cuda, vulkan
from mlcpipe.runtime.threads import use_threads
from mlcpipe.targets import Knobs, Target, Variant, tvm_target
from mlcpipe.tuning.inputs import Inputs
from mlcpipe.tuning.kernels import ruled
from tir_schedules.op import Declined

Array = NDArray[Any]
KERNEL = "kernel"  # the symbol of what is measured
COLD_CACHES = 8  # a last cache may keep part of what only just exceeds it
UNKNOWN_CACHE = 32 << 20
_MOST_COPIES, _MOST_BYTES = 256, 1 << 30
HALF_S = 2e-3  # of a pair: long enough for the clock and a few turns
TOLERANCE = 2e-3  # of the largest output: sums in another order, of values that were rounded alike


class Runner(Protocol):
    """Where kernels run."""

    def build(self, func: tirx.PrimFunc) -> Any:
        """A function that can be called with tensors of this place. Raises CompileError."""

    def tensor(self, values: Array) -> Any:
        """The values, where the kernels are."""

    def seconds(self, function: Any, turns: Sequence[Sequence[Any]]) -> float:
        """Seconds of a call, on average over one call with each of `turns`."""


def llvm_module(target: Target, variant: Variant, func: tirx.PrimFunc) -> Any:
    """The code of a scheduled function for a CPU. Raises CompileError."""
    compiled = tvm_target(target, variant)
    try:
        mod = lower_for_llvm(tvm.IRModule({KERNEL: func.with_attr("global_symbol", KERNEL)}), compiled)
        return tvm.get_global_func("target.build.llvm")(mod, compiled)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CompileError("code generation failed", found=_last_line(error)) from error


@dataclass(frozen=True)
class LocalCpu:
    """This machine's CPU, with the threads that a model would have."""

    target: Target
    variant: Variant

    def build(self, func: tirx.PrimFunc) -> Any:
        return llvm_module(self.target, self.variant, func)[KERNEL]

    def tensor(self, values: Array) -> Any:
        return tvm.runtime.tensor(values)

    def seconds(self, function: Any, turns: Sequence[Sequence[Any]]) -> float:
        began = time.perf_counter()
        for values in turns:
            function(*values)
        return (time.perf_counter() - began) / len(turns)


@dataclass(frozen=True)
class LocalGpu:
    """A GPU of this machine that TVM has a device for."""

    target: Target
    variant: Variant
    device: Any

    def build(self, func: tirx.PrimFunc) -> Any:
        target = tvm_target(self.target, self.variant)
        mod = tvm.IRModule({KERNEL: func.with_attr("global_symbol", KERNEL)})
        try:
            with own_barriers():
                return tirx.build(mod, target=target)[KERNEL]
        except (RuntimeError, ValueError, TypeError) as error:
            raise CompileError("code generation failed", found=_last_line(error)) from error

    def tensor(self, values: Array) -> Any:
        return tvm.runtime.tensor(values, self.device)

    def seconds(self, function: Any, turns: Sequence[Sequence[Any]]) -> float:
        self.device.sync()
        began = time.perf_counter()
        for values in turns:
            function(*values)
        self.device.sync()
        return (time.perf_counter() - began) / len(turns)


def local_runner(target: Target, variant: Variant) -> Runner:
    """The runner for a target of this machine. Raises CompileError or TargetError where none runs its kernels."""
    if target.link == "shared":
        use_threads()
        return LocalCpu(target, variant)
    if target.link == "device":
        vulkan.load()
        spirv.register()
        return LocalGpu(target, variant, tvm.device("vulkan", vulkan.choose().index))
    if target.link == "cuda":
        cuda.load()
        register_cuda(fat_binary(find_nvrtc(), target.architectures))
        return LocalGpu(target, variant, tvm.device("cuda", cuda.choose().index))
    raise CompileError("nothing here runs the target's kernels", where=target.name)


class Bench:
    """One range of rows of one kernel: its default, and turns of arguments that no cache holds where it reads weights
    or the KV cache."""

    def __init__(
        self, runner: Runner, target: Target, rule: str, func: tirx.PrimFunc, given: Inputs, knobs: Knobs
    ) -> None:
        self._runner, self._target, self._rule, self._func, self._knobs = runner, target, rule, func, knobs
        self.nbytes, self._outputs = given.nbytes, given.outputs
        self._turns = [
            [runner.tensor(x) if isinstance(x, np.ndarray) else x for x in given.values]
            for _ in range(copies_of(given, _MOST_COPIES, _MOST_BYTES))
        ]
        self._next = 0
        self._default = self._build({})
        self._expected = self._results(self._default)
        self._calls = 1
        self._calls = max(1, math.ceil(HALF_S / max(self._time(self._default), 1e-7)))

    def pairs(self, choice: Mapping[str, int], count: int) -> list[tuple[float, float]]:
        """Seconds of the default and of a choice, by turns. Raises CompileError where it does not compute the same."""
        candidate = self._build(choice)
        for found, expected in zip(self._results(candidate), self._expected):
            off, limit = float(np.abs(found - expected).max()), TOLERANCE * float(np.abs(expected).max())
            if not off <= limit:
                raise CompileError("the candidate computes something else", expected=f"within {limit:.3g}", found=off)
        for function in (self._default, candidate):
            self._time(function)
        return [(self._time(self._default), self._time(candidate)) for _ in range(count)]

    def _build(self, choice: Mapping[str, int]) -> Any:
        made = ruled(self._target, self._rule, self._func, {**self._knobs, **choice})
        if isinstance(made, Declined):
            raise CompileError("the rule declined", found=made.reason)
        return self._runner.build(made)

    def _results(self, function: Any) -> list[Array]:
        """What a function writes."""
        function(*self._turns[0])
        written: list[Any] = [self._turns[0][index] for index in self._outputs]
        return [_as_numbers(tensor.numpy()) for tensor in written]

    def _time(self, function: Any) -> float:
        first, self._next = self._next, self._next + self._calls
        turns = [self._turns[i % len(self._turns)] for i in range(first, first + self._calls)]
        return self._runner.seconds(function, turns)


def copies_of(given: Inputs, most: int, most_bytes: int) -> int:
    """How many copies of the arguments take turns."""
    if not given.cold:
        return 1
    wanted = min(-(-COLD_CACHES * (last_cache_bytes() or UNKNOWN_CACHE) // given.nbytes), most)
    return max(1, min(wanted, most_bytes // given.nbytes))


def _as_numbers(output: Array) -> Array:
    """An output as float64; bytes are float32, as the KV cache of CPUs passes them."""
    found: Array = (output.reshape(-1).view(np.float32) if output.dtype == np.int8 else output).astype(np.float64)
    return found


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else type(error).__name__
