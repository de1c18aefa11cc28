"""The arithmetic ceiling of this CPU: multiply-adds on registers only, on every thread, no memory read.

The instructions are those of the kernels: float32 vectors, and the integer dot product of the variant, if it has one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tests.kernels.harness import compile_together, variant
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_matmul import dot_of
from tir_schedules.rule import Declined

CHAINS = 12  # independent sums: more than latency times throughput of any of these instructions
LOOPS, REPEATS = 1_000_000, 7


def arithmetic_ceilings(threads: int) -> dict[str, float]:
    """`float32` and, if the variant has a dot product, `int8`: 10^9 multiplications and additions a second."""
    lanes, dot = int(variant().schedule["lanes"]), dot_of(variant().schedule)
    kernels = {"float32": (_float32(lanes, threads), 2 * lanes)}
    if not isinstance(dot, Declined):
        kernels["int8"] = (_int8(dot, threads), 2 * 4 * lanes)
    library = compile_together({name: kernel for name, (kernel, _) in kernels.items()})
    return {
        name: operations * CHAINS * LOOPS * threads / _seconds(library[name], lanes, threads, name) / 1e9
        for name, (_, operations) in kernels.items()
    }


def _seconds(kernel: Any, lanes: int, threads: int, name: str) -> float:
    dtype = {"float32": "float32", "int8": "int32"}[name]
    operands = tvm.runtime.tensor(np.zeros((2, lanes), dtype))  # read when it runs, so that nothing is folded
    sums = tvm.runtime.tensor(np.zeros((threads, lanes), dtype))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        kernel(operands, sums)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _float32(lanes: int, threads: int) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def float32(operands: T.Buffer((2, lanes), "float32"), sums: T.Buffer((threads, lanes), "float32")):
        for t in T.parallel(threads):
            acc = T.alloc_buffer((CHAINS, lanes), "float32")
            for c in T.unroll(CHAINS):
                acc[c, T.ramp(0, 1, lanes)] = operands[0, T.ramp(0, 1, lanes)]
            for _ in T.serial(LOOPS):
                for c in T.unroll(CHAINS):
                    acc[c, T.ramp(0, 1, lanes)] = (
                        acc[c, T.ramp(0, 1, lanes)] * operands[0, T.ramp(0, 1, lanes)]
                        + operands[1, T.ramp(0, 1, lanes)]
                    )
            for c in T.unroll(CHAINS):
                sums[t, T.ramp(0, 1, lanes)] = sums[t, T.ramp(0, 1, lanes)] + acc[c, T.ramp(0, 1, lanes)]

    return float32


def _int8(dot: Dot, threads: int) -> tirx.PrimFunc:
    lanes, width = dot.lanes, f"int8x{4 * dot.lanes}"

    @T.prim_func(s_tir=True)
    def int8(operands: T.Buffer((2, lanes), "int32"), sums: T.Buffer((threads, lanes), "int32")):
        for t in T.parallel(threads):
            acc = T.alloc_buffer((CHAINS, lanes), "int32")
            for c in T.unroll(CHAINS):
                acc[c, T.ramp(0, 1, lanes)] = operands[0, T.ramp(0, 1, lanes)]
            for _ in T.serial(LOOPS):
                for c in T.unroll(CHAINS):
                    acc[c, T.ramp(0, 1, lanes)] = dot(
                        acc[c, T.ramp(0, 1, lanes)],
                        T.reinterpret(operands[0, T.ramp(0, 1, lanes)], dtype=width),
                        operands[1, 0],
                        4,
                    )
            for c in T.unroll(CHAINS):
                sums[t, T.ramp(0, 1, lanes)] = sums[t, T.ramp(0, 1, lanes)] + acc[c, T.ramp(0, 1, lanes)]

    return int8
