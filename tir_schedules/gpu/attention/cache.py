"""The functions of TVM's KV cache for GPUs.

Their calling convention is that of `vm.builtin.paged_attention_kv_cache_create` (tvm/src/runtime/vm/paged_kv_cache.cc,
attn_backend.h). `pages.py` says what pages, queries and outputs hold, `scores.py` has arguments.
"""

from __future__ import annotations

from tvm import tirx

from tir_schedules.gpu.attention.cache_tokens import append, compact, copy_page, merge, read_back, split
from tir_schedules.gpu.attention.decode import decode
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.prefill import prefill_cached, prefill_chunk
from tir_schedules.op import by_hand


def kv_cache_functions(shape: AttentionShape, num_layers: int) -> dict[str, tirx.PrimFunc]:
    """Every function that `mlcpipe/nn/kv_cache.py` hands to TVM's cache, tagged, by its role there.

    TVM passes other length info to layers with a window, so they have functions of their own. If every layer has the
    window, TVM knows of none: the functions for layers without a window mask by it. Models without windows have no
    functions for sliding layers: TVM never calls those, so theirs are the others, which saves compiling two shaders.
    """
    window = shape.sliding_window
    functions = {
        "append": append(shape),
        "prefill_chunk": prefill_chunk(shape),
        "merge": merge(shape),
        "split": split(shape),
        "copy_page": copy_page(shape),
        "read_back": read_back(shape, num_layers),
        "compact": compact(shape),
    }
    for role, make in (("prefill_cached", prefill_cached), ("decode", decode)):
        functions[role] = make(shape, window if shape.all_slide else 0, False)
        if window and not shape.all_slide:
            functions[f"{role}_sliding"] = make(shape, window, True)
    tagged = by_hand(functions, "kv_cache_", **shape.facts)
    return {f"{role}_sliding": tagged[role] for role in ("prefill_cached", "decode")} | tagged
