"""Object files of kernels: kept for the next model that has the same code, and only for that."""

from __future__ import annotations

from dataclasses import replace

import tvm
from tvm.script import tirx as T

from mlcpipe.compiler.build import Kernels, object_file
from mlcpipe.compiler.link import object_format


def module(added: float) -> tvm.IRModule:
    @T.prim_func(s_tir=True)
    def add(X: T.Buffer((4,), "float32")):
        for i in T.serial(4):
            X[i] = X[i] + T.float32(added)

    return tvm.IRModule({"add": add.with_attr("global_symbol", "add")})


def test_the_same_code_is_generated_once() -> None:
    target = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "mtriple": "x86_64-linux-gnu"})
    kernels = Kernels(tvm.IRModule(), module(1), target)
    suffix = f".{object_format()}"
    made = object_file(kernels, suffix)
    assert "add" in {name.removeprefix("__tvm_ffi_") for name in made.names}
    assert object_file(Kernels(tvm.IRModule(), module(1), target), suffix) is made
    newer = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"})
    for other in (
        replace(kernels, internal=module(2)),
        replace(kernels, target=newer),
        Kernels(kernels.internal, kernels.of_hosts, target),
    ):
        assert object_file(other, suffix).code != made.code
