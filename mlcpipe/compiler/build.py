"""A lowered IRModule becomes machine code."""

from __future__ import annotations

from typing import Any

import tvm

from mlcpipe.errors import CompileError
from mlcpipe.passes.lowering import Lowering
from mlcpipe.passes.pipeline import LOWER_TO_VM, run


def build(state: Lowering) -> Any:
    """The `tvm.relax.VMExecutable` of a module that `pipeline.PASSES` went over.

    Raises CompileError with TVM's last words.
    """
    lowered, _ = run(state, LOWER_TO_VM)
    try:
        with state.tvm_target:
            return tvm.relax.build(lowered.mod, target=state.tvm_target, relax_pipeline=None)
    except (RuntimeError, ValueError, TypeError) as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        raise CompileError("code generation failed", where=f"target {state.target.name}", found=lines[-1]) from error


def generated_source(executable: Any) -> str:
    """The machine code of a compiled executable as assembly, module by module."""
    modules, found = [executable.mod], []
    while modules:
        module = modules.pop()
        modules.extend(module.imports)
        if module.kind == "llvm":
            found.append(str(module.inspect_source("asm")))
    return "\n".join(found)
