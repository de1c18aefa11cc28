"""The compiler, as the list of its passes. This is the only place that orders them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import tvm
from tvm import relax, s_tir, tirx

from mlcpipe.errors import CompileError
from mlcpipe.passes.fuse_add_norm import fuse_add_norm
from mlcpipe.passes.fuse_dequantize import fuse_dequantize
from mlcpipe.passes.fuse_gate import fuse_gate
from mlcpipe.passes.fuse_parallel_matmul import fuse_parallel_matmul
from mlcpipe.passes.lowering import Lowering
from mlcpipe.passes.plan_memory import bundle_weights, check_bindings, state_bounds
from mlcpipe.passes.quantize_weights import quantize_weights
from mlcpipe.passes.schedule_kernels import schedule_kernels
from mlcpipe.passes.share_storage import share_storage
from mlcpipe.passes.split_weights import split_weights

Pass = Callable[[Lowering], Lowering]


def _tvm(make: Callable[[], tvm.ir.transform.Pass]) -> Pass:
    def run(state: Lowering) -> Lowering:
        with state.tvm_target:
            return state.with_mod(make()(state.mod))

    run.__name__ = make.__name__
    return run


# Once for all variants of a target.
SHARED: tuple[Pass, ...] = (
    # the model: fewer, larger operations on packed weights
    fuse_parallel_matmul,
    split_weights,
    quantize_weights,
    fuse_dequantize,
    fuse_gate,
    fuse_add_norm,
    # operators to TensorIR, fused
    _tvm(relax.transform.LegalizeOps),
    _tvm(relax.transform.AnnotateTIROpPattern),
    _tvm(relax.transform.FuseOps),
    _tvm(relax.transform.FuseTIR),
    _tvm(relax.transform.RewriteDataflowReshape),
    _tvm(relax.transform.DeadCodeElimination),
    # memory and calls
    state_bounds,
    bundle_weights,
    _tvm(relax.transform.ToNonDataflow),
    _tvm(relax.transform.RemovePurityChecking),
    _tvm(relax.transform.CallTIRRewrite),
    _tvm(relax.transform.StaticPlanBlockMemory),
    share_storage,
    check_bindings,
)

# For each variant: a schedule for every kernel. It changes no call, so that the plan above holds.
PER_VARIANT: tuple[Pass, ...] = (schedule_kernels,)
PASSES = SHARED + PER_VARIANT

# What `tvm.relax.build` needs below; it changes no operation and no allocation any more.
LOWER_TO_VM: tuple[Pass, ...] = tuple(
    _tvm(make)
    for make in (
        relax.transform.LowerAllocTensor,
        relax.transform.KillAfterLastUse,
        relax.transform.LowerRuntimeBuiltin,
        relax.transform.ComputePrimValue,
        relax.transform.VMShapeLower,
        relax.transform.AttachGlobalSymbol,
    )
)

# Scheduled kernels for a CPU to what LLVM's code generator takes: those of TVM's pipeline that have work there. Without
# others (for GPUs; HoistIfThenElse, RemoveNoOp, ...) the same code came out in a quarter of the time. Half of it was
# CompactBufferAllocation's: kernels state how much scratch they need. UnrollLoop multiplies bodies, so it is late.
_FOR_LLVM: tuple[Callable[[], tvm.ir.transform.Pass], ...] = (
    s_tir.transform.CanonicalizeLoop,
    s_tir.transform.LowerInitBlock,
    s_tir.transform.PlanAndUpdateBufferAllocationLocation,
    s_tir.transform.ConvertBlocksToOpaque,
    s_tir.transform.LowerMatchBuffer,
    s_tir.transform.StmtSimplify,
    s_tir.transform.LowerOpaqueBlock,
    tirx.transform.FlattenBuffer,
    tirx.transform.BF16ComputeLegalize,
    lambda: tirx.transform.NarrowDataType(32),
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
)


def lower_for_llvm(kernels: tvm.IRModule, target: tvm.target.Target, *, checked: bool = True) -> tvm.IRModule:
    """Scheduled PrimFuncs as `target.build.llvm` takes them.

    Unless `checked`, they trust the types, shapes and strides of their arguments; the checks are half of the code.
    """
    bind = tirx.transform.BindTarget(target.with_host(target))
    skip = () if checked else (tirx.transform.SkipAssert(),)
    with target:
        return tvm.ir.transform.Sequential([bind, *(make() for make in _FOR_LLVM), *skip])(kernels)


def run(
    state: Lowering, passes: tuple[Pass, ...] = PASSES, *, dump: Path | None = None, check: bool = False
) -> tuple[Lowering, dict[str, float]]:
    """Run the passes in order; return the state and the seconds that each took.

    `dump` is a folder that gets the IR after every pass; `check` verifies after each that it is well formed.
    Raises CompileError that names the pass.
    """
    seconds: dict[str, float] = {}
    for index, one in enumerate(passes):
        began = time.perf_counter()
        try:
            state = one(state)
            if check:
                relax.analysis.well_formed(state.mod)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise CompileError(
                f"pass {one.__name__} failed", where=f"target {state.target.name}", found=_reason(error)
            ) from error
        seconds[one.__name__] = seconds.get(one.__name__, 0.0) + time.perf_counter() - began
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{index:02d}_{one.__name__}.py").write_text(state.mod.script(show_meta=False), encoding="utf-8")
    return state, seconds


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
