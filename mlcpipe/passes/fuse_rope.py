"""Fuses the parts of a joined projection, and their biases, into the RoPE kernel, so they are never copied."""

from __future__ import annotations

from typing import NamedTuple

from tvm import relax

from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, columns_of, is_op, rebuild, tir_op


class _Part(NamedTuple):
    """Columns of a projection, as heads, and their `bias`, if any."""

    projection: relax.Expr
    begin: int
    end: int
    bias: relax.Expr | None


def fuse_rope(state: Lowering) -> Lowering:
    """rope(x[:, :a] + b, x[:, a:c] + d, x[:, c:] + e, cos, sin) -> rope_of_projection(x, cos, sin, b, d, e)."""

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        op = tir_op(work, value)
        if op is None or op.kind != "rope" or not op.int("kv_heads"):
            return None
        *parts, cos, sin = value.args[1].fields
        found = [part for part in (_part(work, one) for one in parts) if part is not None]
        if len(found) < len(parts) or not _are_whole(found):
            return None
        biases = [part.bias for part in found if part.bias is not None]
        dtypes = {str(bias.ty.dtype) for bias in biases}
        if len(biases) not in (0, len(found)) or len(dtypes) > 1:
            return None
        heads, kv_heads, head_dim, rotary_dim = (op.int(n) for n in ("heads", "kv_heads", "head_dim", "rotary_dim"))
        func = definitions.apply_rope_to_projection(
            heads, kv_heads, head_dim, rotary_dim, op.str("dtype"), op.str("kv_dtype"), "".join(dtypes)
        )
        return work.call_tir(func, "rope_of_projection", [found[0].projection, cos, sin, *biases], value.ty)

    return rebuild(state, replacement)


def _part(work: Rebuild, expr: relax.Expr) -> _Part | None:
    reshaped = work.value_of(expr)
    if not is_op(reshaped, "relax.reshape"):
        return None
    source, bias = reshaped.args[0], None
    added = work.value_of(source)
    if is_op(added, "relax.add"):
        source, bias = added.args
        stored = work.value_of(bias)
        bias = stored.args[0] if is_op(stored, "relax.astype") else bias
    columns = columns_of(work, source)
    if columns is None or (bias is not None and list(bias.ty.shape) != [columns[2] - columns[1]]):
        return None
    return _Part(*columns, bias)


def _are_whole(parts: list[_Part]) -> bool:
    """Whether they are all columns of one projection, in their order."""
    projection, at = parts[0].projection, 0
    for part in parts:
        if not part.projection.same_as(projection) or part.begin != at:
            return False
        at = part.end
    return at == int(projection.ty.shape[1])
