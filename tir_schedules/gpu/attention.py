"""The functions of the KV cache for GPUs.

They have the calling convention of `tir_schedules/paged.py`; `kv_pages.py` says what pages, queries and outputs hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx

from tir_schedules.gpu import mma_attention
from tir_schedules.gpu.decode_attention import DecodeTile, decode, decode_tile
from tir_schedules.gpu.kv_pages import (
    ACTIVATION_DTYPES,
    AttentionShape,
    append,
    compact,
    copy_page,
    kv_dtypes,
    merge,
    read_back,
    split,
)
from tir_schedules.gpu.octets import OCTET
from tir_schedules.gpu.prefill_attention import PrefillTile, prefill_cached, prefill_chunk, prefill_tile
from tir_schedules.op import Declined, Op, by_hand
from tir_schedules.paged import ATTENTION, PAGE, heads_of, window_of

__all__ = ["ACTIVATION_DTYPES", "PAGE", "AttentionShape", "kv_cache_functions", "kv_dtypes"]


def kv_cache_functions(shape: AttentionShape, num_layers: int) -> dict[str, tirx.PrimFunc]:
    """Every function that `mlcpipe/nn/kv_cache.py` hands to TVM's cache, by its role there.

    TVM knows layers with a window and without one, and gives the former other length info. If `shape.all_slide`,
    those for layers without attend with the window all the same.
    """
    window = shape.sliding_window
    always = window if shape.all_slide else 0
    functions = {
        "append": append(shape),
        "prefill_chunk": prefill_chunk(shape),
        "prefill_cached": prefill_cached(shape, always, False),
        "decode": decode(shape, always, False),
        "merge": merge(shape),
        "split": split(shape),
        "copy_page": copy_page(shape),
        "read_back": read_back(shape, num_layers),
        "compact": compact(shape),
    }
    if window:
        functions["prefill_cached_sliding"] = prefill_cached(shape, window, True)
        functions["decode_sliding"] = decode(shape, window, True)
    tagged = by_hand(functions, "kv_cache_", **shape.facts)
    # Without windows those for sliding layers are never called, and a kernel less is a shader less to compile.
    return {f"{name}_sliding": tagged[name] for name in ("prefill_cached", "decode")} | tagged


OF_SUBGROUPS = tuple(kind for kind in ATTENTION if "decode" in kind)  # what `of_subgroups` makes again


def of_subgroups(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """A function of the cache for a target that knows the size of a subgroup."""
    size = int(knobs.get("subgroup", 0))
    if not size or op.int("head_dim") % OCTET:
        return Declined(f"heads of {op.int('head_dim')}" if size else "subgroups of no known size")
    shape = AttentionShape(**heads_of(op), subgroup=size, shuffled=bool(knobs["shuffle_x"]))
    return decode(shape, *window_of(op), decode_tile(knobs))


OF_MATRICES = tuple(kind for kind in ATTENTION if "prefill" in kind)  # what `of_matrices` makes again


def of_matrices(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """A function of the cache for a target with matrix units."""
    shape = AttentionShape(**heads_of(op), subgroup=int(knobs.get("subgroup", 0)))
    if reason := mma_attention.fits(shape, knobs):
        return Declined(reason)
    if "chunk" in op.kind:
        return prefill_chunk(shape, mma_attention.TILE, products=True)
    return prefill_cached(shape, *window_of(op), mma_attention.TILE, products=True)


def attention(func: tirx.PrimFunc, op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc:
    """A function of the cache with the tile that knobs say; the one that there is where they say nothing."""
    shape = AttentionShape(**heads_of(op))
    if op.kind in OF_SUBGROUPS:
        small = decode_tile(knobs)
        return func if small == DecodeTile() else decode(shape, *window_of(op), small)
    tile = prefill_tile(knobs)
    if tile == PrefillTile():
        return func
    return prefill_chunk(shape, tile) if "chunk" in op.kind else prefill_cached(shape, *window_of(op), tile)
