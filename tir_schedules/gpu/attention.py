"""The functions of the KV cache for GPUs.

They have the calling convention of `tir_schedules/paged.py`; `kv_pages.py` says what pages, queries and outputs hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from tvm import tirx

from tir_schedules.gpu.decode_attention import decode
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
from tir_schedules.gpu.prefill_attention import prefill_cached, prefill_chunk
from tir_schedules.op import Declined, Op, by_hand
from tir_schedules.paged import PAGE

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
    facts = {**asdict(shape), "all_slide": int(shape.all_slide), "shuffled": int(shape.shuffled)}
    tagged = by_hand(functions, "kv_cache_", **facts)
    # Without windows those for sliding layers are never called, and a kernel less is a shader less to compile.
    return {f"{name}_sliding": tagged[name] for name in ("prefill_cached", "decode")} | tagged


# Kinds of functions that `of_subgroups` makes again.
OF_SUBGROUPS = ("kv_cache_decode", "kv_cache_decode_sliding")


def of_subgroups(op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """A function of the cache for a target that knows the size of a subgroup."""
    size = int(knobs.get("subgroup", 0))
    dim, sliding, all_slide = op.int("head_dim"), op.kind.endswith("_sliding"), bool(op.int("all_slide"))
    if not size or dim % OCTET:
        return Declined(f"heads of {dim}" if size else "subgroups of no known size")
    heads = op.int("num_heads"), op.int("num_kv_heads"), dim, op.str("dtype"), float(op.facts["softcap"])
    shape = AttentionShape(*heads, op.int("sliding_window"), all_slide, size, bool(knobs["shuffle_x"]))
    window = shape.sliding_window if sliding or all_slide else 0
    return decode(shape, window, sliding)
