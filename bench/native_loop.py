"""The native runtime's own loop, apart from TVM's virtual machine and the kernels: its time and heap allocations a token."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.compiler.link import Linker
from mlcpipe.compiler.native_runtime import compile_core, object_files
from mlcpipe.compiler.tvm_sources import source_tree
from mlcpipe.errors import ResourceError, UsageError

_SOURCE = Path(__file__).with_suffix(".cc")


@dataclass(frozen=True)
class LoopCost:
    """Of a token of one answer, or of a step of several: medians in µs, and allocations; `model` is TVM and the kernels."""

    answer: str
    own_us: float
    own_allocations: float
    model_us: float
    model_allocations: float


def write_loop_program(compiler: Linker, cache: Path, output: Path) -> None:
    """Build the program that watches the loop (a minute on one core). Raises CompileError; UsageError without glibc."""
    if platform.libc_ver()[0] != "glibc":
        raise UsageError("allocations are counted below glibc's names", expected="a system with glibc")
    core = output.with_suffix(".o")
    with source_tree().copied() as tree:
        compile_core(compiler, tree, _SOURCE, str(core), "-Wno-keyword-macro", "-DMLCPIPE_GPUS_APART")
    others = [path for path in object_files(compiler, cache) if path.name != "runtime.o"]
    compiler.run([str(core), *map(str, others), "-rdynamic", "-pthread", "-ldl", "-o", str(output)])


def loop_costs(program: Path, bundle: Path, tokens: int, sequences: Sequence[int] = ()) -> list[LoopCost]:
    """The cost of `tokens` in one answer of each kind, and in steps of several answers. Raises ResourceError."""
    command = [str(program), str(bundle), str(tokens), *map(str, sequences)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError("the loop was not measured", found=done.stderr.strip()[-300:])
    return [LoopCost(**json.loads(line)) for line in done.stdout.splitlines()]
