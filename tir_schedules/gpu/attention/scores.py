"""Shared by decode and prefill: the arguments that locate cached keys, masks by window, and scores in base 2.

The scale includes log2(e), so that weights are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, put
from tir_schedules.gpu.attention.pages import (
    AttentionShape,
    Pages,
    cache_heads_argument,
    index_argument,
    pages_argument,
    sums_argument,
)
from tir_schedules.gpu.kernel import keep
from tir_schedules.paged import PAGE

_LOG2E = math.log2(math.e)


def score_of(shape: AttentionShape, dot: Expr, scale: Expr) -> Expr:
    """Scaled, capped score in base 2."""
    if not shape.softcap:
        return dot * (scale * I.float32(_LOG2E))
    return I.tanh(dot * scale / I.float32(shape.softcap)) * I.float32(shape.softcap * _LOG2E)


def with_sink(total: Expr, largest: Expr, sinks: Sequence[Buffer], head: Expr) -> Expr:
    """A sum of weights relative to 2**largest, with that of a head's sink if there is one (Xiao et al. 2023; gpt-oss).

    A sink of 126 powers of two above all scores takes all weight to float32's accuracy, and so does a higher one.
    """
    for sink in sinks:
        return total + I.exp2(I.min(sink[head] * I.float32(_LOG2E) - largest, I.float32(126)))
    return total


def store_sum(shape: AttentionShape, out: Buffer, lse: Buffer, row: Expr, head: Expr, sum_: Expr) -> None:
    """lse[row, head] = the log-sum-exp of a head in base 2.

    TVM's cache keeps it to itself. Where heads have sinks, which the model counts (nn/kv_cache.py), `out` says it too:
    the first half of its last `sum_heads` heads has it in their dtype, the second what that left out. What float16
    holds is cut off by bits: NVIDIA's compiler of shaders drops a conversion there and back.
    """
    put(lse, (row, head), sum_)
    if shape.sum_heads:
        at, d = keep(shape.num_heads + head // shape.head_dim), keep(head % shape.head_dim)
        cut = I.reinterpret("float32", I.bitwise_and(I.reinterpret("uint32", sum_), I.uint32(0xFFFFE000)))
        held = keep(cut if shape.row_dtype == "float16" else sum_)
        put(out, (row, at, d), held)
        put(out, (row, at + shape.sum_heads // 2, d), sum_ - held)


@dataclass(frozen=True)
class Cached:
    """TVM's arguments that say where the cached keys of each sequence are."""

    sliding_info: bool
    pages: Pages
    indptr: Buffer
    indices: Buffer
    length: Buffer
    k_position: Buffer
    q_position: Buffer

    def keys(self, b: Expr) -> Expr:
        """Cached tokens of sequence b."""
        last = self.length[0, b] if self.sliding_info else self.length[b]
        count = self.indptr[b + 1] - self.indptr[b]
        return keep(I.if_then_else(count > 0, (count - 1) * PAGE + last, 0))

    def oldest(self, b: Expr, row: Expr, window: int) -> Expr:
        """The first key of sequence b that the query `row` sees."""
        return keep(I.max(self.q_position[row] - self.k_position[b] - (window - 1), 0))

    def table(self, b: Expr) -> Callable[[Expr], Expr]:
        """The page of tokens 16 i ... 16 i + 15 of sequence b, by i."""
        return lambda i: self.indices[self.indptr[b] + i]


def cached_arguments(shape: AttentionShape, batch: Expr, queries: Expr, sliding_info: bool) -> dict[str, Argument]:
    """Pages, page table, lengths and positions, in the order of `Cached`."""
    return {
        "pages": pages_argument(shape),
        "indptr": index_argument(batch + 1),
        "indices": index_argument(tirx.Var("used_pages", "int32")),
        "length": index_argument(3, batch) if sliding_info else index_argument(batch),
        "k_position": index_argument(batch),
        "q_position": index_argument(queries),
    }


def results(shape: AttentionShape, rows: Expr, causal: bool = False) -> dict[str, Argument]:
    """Outputs, and TVM's numbers at the end, of which only the scale, the last, matters: RoPE is in the graph."""
    outputs: dict[str, Argument] = {"output": cache_heads_argument(shape, rows), "lse": sums_argument(shape, rows)}
    numbers = {"rotary_mode": "int32", "rope_scale": "float32", "rope_theta": "float32", "sm_scale": "float32"}
    return outputs | ({"causal": "int32"} if causal else {}) | numbers
