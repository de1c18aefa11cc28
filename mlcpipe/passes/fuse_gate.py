"""Fuses act(gate) * up into the projection's kernel: the projection is never written to memory.

Except a projection that adapters change: then the gate is a separate kernel with the same result.
"""

from __future__ import annotations

from tvm import relax

from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, columns_of, is_op, rebuild, scheme_of, tir_op
from mlcpipe.quantization.layout import load_layout

_ACTIVATIONS = {"relax.nn.silu": "silu", "relax.nn.gelu_tanh": "gelu_tanh"}


def fuse_gate(state: Lowering) -> Lowering:
    """act(h[:, :w]) * h[:, w:] with h = matmul(x, packed) -> gated_matmul(x, packed); for an adapted h: gate(h)."""

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        if not is_op(value, "relax.multiply"):
            return None
        activated = work.value_of(value.args[0])
        activation = next((name for op, name in _ACTIVATIONS.items() if is_op(activated, op)), None)
        if activation is None:
            return None
        gate, up = _half(work, activated.args[0]), _half(work, value.args[1])
        if gate is None or up is None or not gate[0].same_as(up[0]) or (gate[1], up[1]) != (0, 1):
            return None
        call = work.value_of(gate[0])
        if is_op(call, "relax.call_tir_inplace"):
            func = definitions.gate(int(value.ty.shape[1]), activation, str(value.ty.dtype))
            return work.call_tir(func, "gate", [gate[0]], value.ty)
        op = tir_op(work, call)
        if op is None or op.kind != "matmul":
            return None
        func = definitions.gated_matmul(
            scheme_of(state, op),
            load_layout(op.str("layout")),
            op.int("n"),
            op.int("k"),
            activation,
            str(value.ty.dtype),
        )
        return work.call_tir(func, "gated_matmul", list(call.args[1].fields), value.ty)

    return rebuild(state, replacement)


def _half(work: Rebuild, expr: relax.Expr) -> tuple[relax.Expr, int] | None:
    """(matrix, 0 or 1) if `expr` is the first or second half of the matrix's columns."""
    columns = columns_of(work, expr)
    if columns is None:
        return None
    source, begin, end = columns
    width = int(source.ty.shape[1]) // 2
    half = {(0, width): 0, (width, 2 * width): 1}.get((begin, end))
    return None if half is None else (source, half)
