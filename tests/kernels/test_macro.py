"""`tir_schedules.macro`: the same kernels as with TVM's `T.macro`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tir_schedules.macro import macro


def kernel(decorate: Callable[[Callable[..., None]], Any], size: int) -> tirx.PrimFunc:
    def scaled(X, Y, i, factor):
        part = T.alloc_buffer((1,), "float32")
        part[0] = X[i] * T.float32(factor)
        Y[i] = part[0] + T.float32(size)

    inner = decorate(scaled)

    def twice(X, Y, i):
        inner(X, Y, i, 2)
        inner(X, Y, i, 3)

    outer = decorate(twice)

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((size,), "float32"), Y: T.Buffer((size,), "float32")):
        for i in T.serial(size):
            outer(X, Y, i)
        for i in T.serial(size):
            outer(Y, X, i)

    return func


def test_macros_of_macros_are_expanded_as_tvm_does() -> None:
    made = {size: kernel(macro, size) for size in (4, 8)}
    for size, func in made.items():
        tvm.ir.assert_structural_equal(func, kernel(T.macro, size))


def test_a_macro_needs_a_kernel_around_it() -> None:
    @macro
    def nothing() -> None:
        pass

    with pytest.raises(RuntimeError, match="macro nothing was called outside of TVMScript"):
        nothing()
