"""Marks the matrix products of prefill, whose kernels compute differently from those of decode.

A row's arithmetic follows its kind, never the number of rows, so a result does not depend on concurrent requests.
Prefill rows are *many*: tokens of a prompt. Decode rows are *few*, be it one or hundreds: decoded and verified tokens,
and rows whose logits are computed. The symbolic sizes of `nn/causal_lm.py` tell the kinds apart.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from mlcpipe.passes.lowering import Lowering, Rebuild, rebuild, tir_op
from tir_schedules.op import with_facts

# The sizes from which every dimension of a prompt's tokens is computed, and of a picture's patches.
PROMPT_TOKENS = ("n", "t")
# Operations whose arithmetic may differ by kind.
_KINDS = {
    "cpu": ("matmul", "gated_matmul"),
    "gpu": (
        *("matmul", "gated_matmul", "expert_matmul"),
        *("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"),
    ),
}


def mark_prompt_rows(state: Lowering) -> Lowering:
    """Tag operations on a prompt's tokens with `rows="many"` and, for GPUs, the others with `rows="few"`.

    Kernels over TVM's cache choose by the number of rows.
    """
    kernels, marked = state.target.kernels, dict[tuple[str, str], tirx.PrimFunc]()
    if not state.target.own_pages:
        return state

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        op = tir_op(work, value)
        if op is None or op.kind not in _KINDS[kernels]:
            return None
        args = list(value.args[1].fields)
        rows = "many" if _has_prompt_tokens(args[0].ty.shape[0]) else "few"
        if (kernels, rows) == ("cpu", "few"):
            return None
        known = value.args[0].name_hint, rows
        if known not in marked:
            marked[known] = with_facts(work.bb.get()[value.args[0]], rows=rows)
        outputs = list(value.ty.fields) if isinstance(value.ty, relax.TupleType) else value.ty
        return work.call_tir(marked[known], f"{op.kind}_{rows}", args, outputs)

    return rebuild(state, replacement)


def _has_prompt_tokens(size: tirx.PrimExpr) -> bool:
    """Whether a size depends on the number of a prompt's tokens."""
    return any(var.name in PROMPT_TOKENS for var in tvm.tirx.analysis.undefined_vars(size))
