"""Packs and unpacks weights of any scheme: groups of codes, or plain numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError, UsageError
from mlcpipe.quantization import block_search, gptq, groups, native_formats, plain, search, signed_blocks
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.scheme import Scheme, check_shapes
from mlcpipe.support.defaults import GPTQ, METHODS, RTN, SEARCH

Array = NDArray[Any]


def method_of(scheme: Scheme, requested: str | None, more: Collection[Scheme] = ()) -> str:
    """The method that a scheme's weights are quantized by: the requested one, or the best.

    `more` are schemes of single matrices. Raises UsageError for an unknown method, or one without effect on these.
    """
    if requested not in (None, *METHODS):
        raise UsageError("unknown method", expected=" or ".join(METHODS), found=requested)
    found = any(map(search.searchable, (scheme, *more)))
    if requested is not None and not (any(one.bits for one in (scheme, *more)) if requested == RTN else found):
        raise UsageError(
            f"--method {requested} has no effect on {scheme.name}",
            next_step="leave it, or --best, out, or choose a quantization such as q4f16_1",
        )
    return requested or (SEARCH if found else RTN)


def pack(
    scheme: Scheme, w: Array, *, name: str = "weight", method: str = RTN, inputs: Inputs | None = None
) -> dict[str, Array]:
    """Pack w float32[N, K] or [experts, N, K] into the arrays of `shapes`. `name` is for messages.

    `method` rtn is MLC-LLM's arithmetic; search finds the scales of least error, where `search.searchable`. `inputs`,
    those of all rows of w, weight the error by column; gptq needs their `gram`, and is search without.
    Processes rows in chunks: needs a few MB in addition to w and the result. A plain scheme in the dtype of w
    returns w itself.

    Raises CheckpointError for NaN or infinity, for |w| > 65504 with model_dtype float16, and for an
    array that is empty or not two- or three-dimensional.
    """
    rows = _rows(scheme, w, name)
    if scheme.bits == 0:
        packed = {"weight": plain.pack(rows, scheme.model_dtype, name)}
    elif method == GPTQ and gptq.applies(scheme) and inputs is not None and inputs.gram is not None:
        packed = gptq.pack(scheme, rows, name, inputs)
    elif scheme.minima and scheme.super_size:
        packed = block_search.pack(scheme, rows, name, method, inputs)
    elif scheme.kept:
        packed = signed_blocks.pack(scheme, rows, name, method, inputs)
    elif method != RTN and search.searchable(scheme):
        packed = search.pack(scheme, rows, name, inputs)
    else:
        packed = groups.pack(scheme, rows, name)
    return {key: a.reshape(*w.shape[:-1], a.shape[-1]) for key, a in packed.items()}


def unpack(scheme: Scheme, packed: Mapping[str, Array], k: int) -> Array:
    """Packed arrays -> float32[..., N, k]: (code - zero_point) * scale in float32.

    With a float16 scale that product is exact; a kernel that multiplies in float16 rounds it once more.
    Raises CheckpointError if the arrays do not match this scheme for rows of k elements.
    """
    first = packed.get("weight" if scheme.bits == 0 else "q_weight")
    if first is None or first.ndim not in (2, 3):
        raise CheckpointError(
            "packed weight",
            where=scheme.name,
            expected=f"2 or 3 dimensions, arrays {sorted(scheme.shapes(1, k))}",
            found=f"arrays {sorted(packed)}",
        )
    experts = first.shape[0] if first.ndim == 3 else None
    check_shapes(packed, scheme.shapes(first.shape[-2], k, experts), scheme.name)
    if scheme.bits == 0:
        return first.astype(np.float32)
    flat = {key: a.reshape(-1, a.shape[-1]) for key, a in packed.items()}
    unpacked = native_formats.unpack if scheme.kept else groups.unpack
    return unpacked(scheme, flat, k).reshape(*first.shape[:-1], k)


def error_bound(scheme: Scheme, w: Array) -> Array:
    """Elementwise bound, float32 of w's shape, on |w - unpack(pack(w))|; see `groups.error_bound`."""
    rows = _rows(scheme, w, "weight")
    if scheme.bits == 0:
        bound = plain.error_bound(rows, scheme.model_dtype)
    else:
        bound = groups.error_bound(scheme, rows)
    return bound.reshape(w.shape)


def _rows(scheme: Scheme, w: Array, name: str) -> Array:
    """w as [rows, K], a view where w is contiguous."""
    if w.ndim not in (2, 3) or w.size == 0:
        raise CheckpointError(
            f"tensor {name} cannot be quantized to {scheme.name}",
            expected="[N, K] or [experts, N, K], not empty",
            found=list(w.shape),
        )
    return w.reshape(-1, w.shape[-1])
