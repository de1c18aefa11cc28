"""The compiler's phases of named passes, from a model's module to code generator input, for CPUs and GPUs.

This is the only place that orders passes. The compiler runs these phases and combines their results:

    MODEL OPERATORS MEMORY    once for all variants of a target (SHARED)
    LAYER                     instead of MODEL for one layer, whose weights change and whose inputs are observed
    SCHEDULE                  for each variant: a schedule for every kernel; calls stay the same
    VM                        model functions to bytecode of TVM's virtual machine
    LLVM [UNCHECKED]          scheduled kernels for a CPU
    DEVICE, then [UNCHECKED] HOST and SHADERS    scheduled kernels for a GPU: split into launching and launched code;
                                     SOURCES replaces SHADERS where a compiler takes the launched code as source

Only the driver check (`compiler/driver_check.py`) uses TVM's schedules, which need TVM's pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import tvm
from tvm import relax, s_tir, tirx

from mlcpipe.errors import CompileError, last_line
from mlcpipe.passes.add_adapters import add_adapters
from mlcpipe.passes.annotate_bounds import annotate_bounds
from mlcpipe.passes.bind_target import bind_target
from mlcpipe.passes.bundle_weights import bundle_weights
from mlcpipe.passes.check_bindings import check_bindings
from mlcpipe.passes.dedupe_kernels import dedupe_kernels
from mlcpipe.passes.fuse_adapters import fuse_adapters
from mlcpipe.passes.fuse_add_norm import fuse_add_norm
from mlcpipe.passes.fuse_dequantize import fuse_dequantize
from mlcpipe.passes.fuse_gate import fuse_gate
from mlcpipe.passes.fuse_parallel_matmul import fuse_parallel_matmul
from mlcpipe.passes.fuse_rope import fuse_rope
from mlcpipe.passes.lowering import Module
from mlcpipe.passes.mark_prompt_rows import mark_prompt_rows
from mlcpipe.passes.observe_inputs import observe_inputs
from mlcpipe.passes.overlap_launches import overlap_launches
from mlcpipe.passes.quantize_weights import quantize_weights
from mlcpipe.passes.reuse_views import reuse_views
from mlcpipe.passes.schedule_kernels import schedule_kernels
from mlcpipe.passes.share_storage import share_storage
from mlcpipe.passes.skip_list_checks import skip_list_checks
from mlcpipe.passes.split_weights import split_weights
from mlcpipe.passes.write_outputs import write_outputs
from mlcpipe.support import debug

State = TypeVar("State", bound=Module)
Pass = Callable[[Any], Any]  # on a Lowering, or a KernelModule in phases after VM
MakePass = Callable[[], tvm.ir.transform.Pass]


@dataclass(frozen=True)
class Phase:
    """Passes in order; dumps and timings show the phase's name."""

    name: str
    passes: tuple[Pass, ...]


def _tvm(*makers: MakePass) -> tuple[Pass, ...]:
    """TVM passes with the state's target in scope."""

    def wrapped(make: MakePass) -> Pass:
        def run_pass(state: Module) -> Any:
            with state.tvm_target:
                return state.with_mod(make()(state.mod))

        run_pass.__name__ = make.__name__
        return run_pass

    return tuple(map(wrapped, makers))


def narrow_indices() -> tvm.ir.transform.Pass:
    return tirx.transform.NarrowDataType(32)


# Fewer, larger operations on packed weights.
MODEL = Phase(
    "1-model",
    (
        fuse_parallel_matmul,
        add_adapters,
        split_weights,
        quantize_weights,
        fuse_dequantize,
        fuse_gate,
        fuse_rope,
        fuse_add_norm,
        mark_prompt_rows,
        fuse_adapters,
    ),
)

# Without passes that join or split weights.
LAYER = Phase(
    "1-layer", (observe_inputs, quantize_weights, fuse_dequantize, fuse_rope, fuse_add_norm, mark_prompt_rows)
)

# Operators to TensorIR, fused.
OPERATORS = Phase(
    "2-operators",
    (
        *_tvm(
            relax.transform.LegalizeOps,
            relax.transform.AnnotateTIROpPattern,
            relax.transform.FuseOps,
            relax.transform.FuseTIR,
            relax.transform.RewriteDataflowReshape,
            relax.transform.DeadCodeElimination,
        ),
        write_outputs,
    ),
)

MEMORY = Phase(
    "3-memory",
    (
        annotate_bounds,
        bundle_weights,
        *_tvm(
            relax.transform.ToNonDataflow,
            relax.transform.RemovePurityChecking,
            relax.transform.CallTIRRewrite,
            relax.transform.StaticPlanBlockMemory,
        ),
        share_storage,
        reuse_views,
        check_bindings,
    ),
)

SCHEDULE = Phase("4-schedule", (schedule_kernels,))

# What `tvm.relax.build` does after planning memory, and `skip_list_checks`: no operation or allocation changes here.
# Without KillAfterLastUse: planned storages are shared by all that could be freed.
VM = Phase(
    "5-vm",
    (
        *_tvm(
            relax.transform.LowerAllocTensor,
            relax.transform.LowerRuntimeBuiltin,
            relax.transform.ComputePrimValue,
        ),
        skip_list_checks,
        *_tvm(relax.transform.VMShapeLower, relax.transform.AttachGlobalSymbol),
    ),
)

# The passes of TVM's pipeline that affect our CPU kernels. Without the others (for GPUs; HoistIfThenElse, RemoveNoOp,
# ...) the code is the same, in a quarter of the time. CompactBufferAllocation took half, but kernels declare their
# scratch. UnrollLoop multiplies bodies, so it runs late.
LLVM = Phase(
    "6-llvm",
    (
        bind_target,
        *_tvm(
            s_tir.transform.CanonicalizeLoop,
            s_tir.transform.LowerInitBlock,
            s_tir.transform.PlanAndUpdateBufferAllocationLocation,
            s_tir.transform.ConvertBlocksToOpaque,
            s_tir.transform.LowerMatchBuffer,
            s_tir.transform.StmtSimplify,
            s_tir.transform.LowerOpaqueBlock,
            tirx.transform.FlattenBuffer,
            tirx.transform.BF16ComputeLegalize,
            narrow_indices,
            tirx.transform.VectorizeLoop,
            tirx.transform.StorageRewrite,
            tirx.transform.StmtSimplify,
            s_tir.transform.RewriteUnsafeSelect,
            tirx.transform.CommonSubexprElim,
            tirx.transform.UnrollLoop,
            tirx.transform.AnnotateEntryFunc,
            tirx.transform.MakePackedAPI,
            tirx.transform.BF16StorageLegalize,
            tirx.transform.LowerTVMBuiltin,
            tirx.transform.LowerIntrin,
        ),
    ),
)

# For kernels that only the VM calls, as it checks the hosts' arguments. Checks of types, shapes and strides are half of
# the code.
UNCHECKED = Phase("7-unchecked", _tvm(tirx.transform.SkipAssert))

# The passes of TVM's pipeline that affect our GPU kernels, except these:
# - ThreadSync: kernels have their own barriers. TVM sees hazards even where each invocation uses its own elements, and
#   fails on those in conditions.
# - StorageRewrite: it may alias two shared arrays, which is safe only with ThreadSync's barriers.
# - CompactBufferAllocation: kernels declare their memory, and it takes three quarters of a compilation. It would also
#   make a kernel depend on the others of its function: extents become expressions of many terms.
# - CommonSubexprElim before the split: terms common to a function's kernels would become kernel arguments.
# - HoistIfThenElse, and StmtSimplify and RemoveNoOp after UnrollLoop, which simplifies for a third of the time what the
#   passes before and after it leave the same: loops without iterations go as soon as StmtSimplify has found them.
DEVICE = Phase(
    "6-device",
    (
        bind_target,
        *_tvm(
            s_tir.transform.CanonicalizeLoop,
            s_tir.transform.LowerInitBlock,
            s_tir.transform.PlanAndUpdateBufferAllocationLocation,
            s_tir.transform.ConvertBlocksToOpaque,
            s_tir.transform.UnifyThreadBinding,
            s_tir.transform.LowerMatchBuffer,
            s_tir.transform.StmtSimplify,
            tirx.transform.RemoveNoOp,
            s_tir.transform.LowerOpaqueBlock,
            tirx.transform.FlattenBuffer,
            tirx.transform.BF16ComputeLegalize,
            narrow_indices,
            tirx.transform.VectorizeLoop,
            tirx.transform.UnrollLoop,
            s_tir.transform.RenormalizeSplitPattern,
            s_tir.transform.RewriteUnsafeSelect,
            tirx.transform.VerifyMemory,
            tirx.transform.AnnotateEntryFunc,
            tirx.transform.SplitHostDevice,
            tirx.transform.MakePackedAPI,
            tirx.transform.FP8StorageLegalize,
            tirx.transform.BF16StorageLegalize,
        ),
        dedupe_kernels,
    ),
)

# Launch code, and kernels. Compilers that take kernels as source eliminate common terms themselves: once an index is in
# a variable, TVM no longer sees that it is a multiple of 4, and splits vector loads.
HOST = Phase("7-host", _tvm(tirx.transform.LowerTVMBuiltin, tirx.transform.LowerIntrin))
SOURCES = Phase("7-sources", (*_tvm(tirx.transform.StmtSimplify, tirx.transform.LowerIntrin), overlap_launches))
SHADERS = Phase("7-shaders", (*SOURCES.passes, *_tvm(tirx.transform.CommonSubexprElim)))

SHARED = (MODEL, OPERATORS, MEMORY)


def run(state: State, *phases: Phase, check: bool = False) -> State:
    """The state after the phases.

    MLCPIPE_DEBUG shows each pass's time; `state.dump` is a folder for the IR after each pass. `check` verifies after
    each pass that the module is well formed. Raises CompileError naming the pass.
    """
    for phase in phases:
        for index, run_pass in enumerate(phase.passes):
            began = time.perf_counter()
            try:
                state = run_pass(state)
                if check:
                    relax.analysis.well_formed(state.mod)
            except (RuntimeError, ValueError, TypeError, KeyError) as error:
                raise CompileError(
                    f"pass {run_pass.__name__} failed", where=f"target {state.name}", found=last_line(error)
                ) from error
            debug.show_time(f"{state.name} {phase.name} {run_pass.__name__}", began)
            if state.dump is not None:
                folder = state.dump / state.name / phase.name
                folder.mkdir(parents=True, exist_ok=True)
                text = state.mod.script(show_meta=False)
                (folder / f"{index:02d}_{run_pass.__name__}.py").write_text(text, encoding="utf-8")
    return state
