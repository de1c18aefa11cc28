"""Splits weights by rows, one parameter per part: those larger than the device's binding limit, and experts whose gate
and up are stored in two formats.

WebGPU guarantees 128 MiB per binding (https://www.w3.org/TR/webgpu/#limits) and tvmjs binds whole buffers; the
embedding of a 128k-token vocabulary is larger. A row's result depends on that row only, so the values do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from tvm import relax

from mlcpipe.errors import TargetError
from mlcpipe.nn import definitions
from mlcpipe.passes.lowering import Lowering, Rebuild, is_op, rebuild, tir_op
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import plain_scheme
from mlcpipe.weights.table import Weight, stored

_LIMIT = "max_binding_bytes"


def split_weights(state: Lowering) -> Lowering:
    """Split matrices, tables and experts along their rows where a stored array exceeds the target's binding.

    Experts are also split where `keep` found parts.
    """
    limit = state.target.limits.get(_LIMIT)
    parts = {i: split for i, w in enumerate(state.weights) if len(split := _parts(state, w, limit)) > 1}
    if not parts:
        return state
    table = tuple(part for i, w in enumerate(state.weights) for part in parts.get(i, [w]))
    pieces: dict[relax.Var, list[relax.Var]] = {}

    def prologue(work: Rebuild, old: list[relax.Var], new: list[relax.Var]) -> None:
        pieces.clear()
        fresh = iter(new)
        for i, var in enumerate(old):
            own_parts = [next(fresh) for _ in parts.get(i, [None])]
            if i in parts:
                pieces[var] = own_parts
            else:
                work.values[var] = own_parts[0]

    def replacement(work: Rebuild, var: relax.Var, value: relax.Expr) -> relax.Expr | None:
        if is_op(value, "relax.matmul"):
            transposed = work.value_of(value.args[1])
            if is_op(transposed, "relax.permute_dims") and transposed.args[0] in pieces:
                return _columns(work, pieces[transposed.args[0]], lambda w: _matmul(work, value, w))
        elif is_op(value, "relax.take") and value.args[0] in pieces:
            return _take(work, pieces[value.args[0]], value.args[1])
        elif is_op(value, "relax.call_tir"):
            return _expert_matmul(work, value, pieces)
        return None

    return rebuild(state, replacement, table, prologue)


def _parts(state: Lowering, weight: Weight, limit: int | None) -> list[Weight]:
    """The weight, or row ranges of one format each, with arrays of at most `limit` bytes."""
    if weight.parts:
        return [piece for part in weight.parts for piece in _parts(state, part, limit)]
    if limit is None or weight.gathered:
        return [weight]
    largest = _largest(stored(weight, state.scheme, state.layout))
    if largest <= limit:
        return [weight]
    rows, lanes = weight.shape[-2] if len(weight.shape) > 1 else 1, max(1, state.layout.lanes)
    blocks = math.ceil(rows / lanes)
    max_blocks = blocks * limit // largest  # per part
    if max_blocks == 0 or weight.kind not in ("scheme", "plain"):
        raise TargetError(
            f"weight {weight.name} {list(weight.shape)} does not fit a binding",
            where=state.target.name,
            expected=f"{_LIMIT} of {limit:,} bytes or less",
            found=f"{largest:,} bytes",
            next_step="choose a quantization with fewer bits, or a smaller model",
        )
    # As few equal parts as possible, in whole blocks of the layout: their arrays are slices of the whole's.
    height = math.ceil(blocks / math.ceil(blocks / max_blocks)) * lanes
    stem = weight.name.removesuffix("weight")
    return [
        replace(
            weight,
            name=f"{stem}part{begin // height}.weight",
            shape=(*weight.shape[:-2], min(height, rows - begin), weight.shape[-1]),
            rows=(begin, min(begin + height, rows)),
        )
        for begin in range(0, rows, height)
    ]


def _largest(weight: Weight) -> int:
    """Bytes of a weight's largest stored array."""
    return max(
        int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in weight.arrays().values()
    )


def _columns(work: Rebuild, parts: list[relax.Var], product: Callable[[relax.Var], relax.Expr]) -> relax.Expr:
    """The concatenated products with the parts."""
    return relax.op.concat([work.emit(product(part)) for part in parts], axis=1)


def _matmul(work: Rebuild, value: relax.Call, weight: relax.Var) -> relax.Expr:
    transposed = work.emit(relax.op.permute_dims(weight))
    return relax.op.matmul(value.args[0], transposed, out_dtype=value.attrs.out_dtype)


def _take(work: Rebuild, parts: list[relax.Var], ids: relax.Expr) -> relax.Expr:
    """Rows from the part that holds them: an id outside a part reads some row, which `where` discards."""
    begin = 0
    selected: relax.Expr | None = None
    column = work.emit(relax.op.expand_dims(ids, [1]))
    for part in parts:
        offset = relax.const(begin, "int32")
        inside = ids if begin == 0 else work.emit(relax.op.subtract(ids, offset))
        rows = work.emit(relax.op.take(part, inside, axis=0))
        if selected is None:
            selected = rows
        else:
            before = work.emit(relax.op.less(column, offset))
            selected = work.emit(relax.op.where(before, selected, rows))
        begin += int(part.ty.shape[0])
    assert selected is not None
    return selected


def _expert_matmul(work: Rebuild, value: relax.Call, pieces: dict[relax.Var, list[relax.Var]]) -> relax.Expr | None:
    op = tir_op(work, value)
    if op is None or op.kind != "expert_matmul" or value.args[1].fields[1] not in pieces:
        return None
    x, weight, ids = value.args[1].fields
    dtype, row = str(value.ty.dtype), load_layout("row")
    plain = plain_scheme(str(weight.ty.dtype))

    def product(part: relax.Var) -> relax.Expr:
        experts, n, k = (int(extent) for extent in part.ty.shape)
        func = definitions.expert_matmul(plain, row, experts, n, k, op.int("top"), bool(op.int("shared")), dtype)
        out = relax.TensorType((value.ty.shape[0], n), dtype)
        return work.call_tir(func, "expert_matmul", [x, part, ids], out)

    return _columns(work, pieces[weight], product)
