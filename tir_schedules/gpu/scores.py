"""What decode and prefill share: the arguments of cached keys, which of them a query sees, and scores in base 2.

log2(e) is part of the scale, so that weights are powers of two.
"""

from __future__ import annotations

import math

from tvm.script.ir_builder import tirx as I

from tir_schedules import paged
from tir_schedules.gpu.kernel import Argument, Expr, keep
from tir_schedules.gpu.kv_pages import (
    AttentionShape,
    heads_argument,
    index_argument,
    pages_argument,
    sums_argument,
)

_LOG2E = math.log2(math.e)


def score_of(shape: AttentionShape, dot: Expr, scale: Expr) -> Expr:
    """Scaled, capped score in base 2."""
    if not shape.softcap:
        return dot * (scale * I.float32(_LOG2E))
    return I.tanh(dot * scale / I.float32(shape.softcap)) * I.float32(shape.softcap * _LOG2E)


class Cached(paged.Cached):
    """The arguments that say where the cached keys of each sequence are."""

    def keys(self, b: Expr) -> Expr:
        """Cached tokens of sequence b."""
        return keep(super().keys(b))

    def oldest(self, b: Expr, row: Expr, window: int) -> Expr:
        """The first key of sequence b that the query `row` sees."""
        return keep(I.max(self.q_position[row] - self.k_position[b] - (window - 1), 0))


def cached_arguments(shape: AttentionShape, batch: Expr, queries: Expr, sliding_info: bool) -> dict[str, Argument]:
    """The arguments of `Cached`."""
    return paged.cached_arguments(pages_argument(shape), index_argument, batch, queries, sliding_info)


def results(shape: AttentionShape, rows: Expr, causal: bool = False) -> dict[str, Argument]:
    """Outputs and numbers; the last is the scale."""
    return dict(paged.results(heads_argument(shape, rows), sums_argument(shape, rows), causal))
