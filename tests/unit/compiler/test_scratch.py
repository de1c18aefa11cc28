"""The scratch memory of kernels is read from their lowered code."""

from __future__ import annotations

import tvm
from tvm.script import tirx as T

from mlcpipe.compiler.build import Kernels
from mlcpipe.compiler.scratch import Scratch, allocations


def test_blocks_of_the_caller_and_of_helpers() -> None:
    """Rows are rounded up to 4 in one block; threads of a loop have one of 2000 numbers each."""

    @T.prim_func(s_tir=True)
    def copy(x: T.handle, y: T.handle):
        m = T.int64()
        X, Y = T.match_buffer(x, (m, T.int64(300))), T.match_buffer(y, (m, T.int64(300)))
        padded = T.alloc_buffer(((m + T.int64(3)) // T.int64(4) * T.int64(4), T.int64(300)))
        for i, j in T.grid(m, T.int64(300)):
            with T.sblock("pad"):
                vi, vj = T.axis.remap("SS", [i, j])
                padded[vi, vj] = X[vi, vj]
        for i in T.parallel(m):
            with T.sblock("rows"):
                vi = T.axis.spatial(m, i)
                T.reads(padded[vi, T.int64(0) : T.int64(300)])
                T.writes(Y[vi, T.int64(0) : T.int64(300)])
                row = T.alloc_buffer((T.int64(2000),))
                for j in T.serial(T.int64(2000)):
                    row[j] = padded[vi, j % T.int64(300)]
                for j in T.serial(T.int64(300)):
                    Y[vi, j] = row[j + T.int64(1700)]

    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "mtriple": "x86_64-linux-gnu"})
    kernels = Kernels(tvm.IRModule({"copy": copy.with_attr("global_symbol", "copy")}), tvm.IRModule(), target)
    found = allocations(kernels.lowered())["copy"]
    assert found.at(5) == Scratch((8 * 300 * 4, 2000 * 4), (2000 * 4,))
    assert found.at(1) == Scratch((2000 * 4, 4 * 300 * 4), (2000 * 4,))


def test_threads_keep_the_largest_blocks() -> None:
    several = [Scratch((9, 1), (4,)), Scratch((5, 5, 2), ()), Scratch()]
    assert Scratch.most(several) == Scratch((9, 5, 2), (4,))
