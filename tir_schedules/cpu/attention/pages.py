"""The layout of pages of the KV cache on CPUs, and how arguments of functions over pages view memory.

The runtime owns the pages, as bytes; every function views them with their real dtypes. Queries and outputs are float32.

A page holds 16 tokens. For each KV head it contains, one after another: K transposed, [head_dim, 16], so that one
vector load has the same dimension of 16 keys; V, [16, v_dim], unless it is `latent`; and for q8 the scales of K and of
V, float16 [groups, 16] each. Of q4 an element is a byte of two codes, so that K is [head_dim / 2, 16] and V
[16, v_dim / 2]; `paged.py` says which two.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor
from tir_schedules.paged import BIAS_MARGIN, ITEM_BITS, PAGE, QUANTIZED, Heads, has_q4

ACTIVATION_DTYPES = ("float32",)


def kv_dtypes(activation_dtype: str, head_dim: int, own_pages: bool) -> tuple[str, ...]:
    """How K and V can be kept."""
    return tuple(dtype for dtype in ITEM_BITS if dtype != "q4" or has_q4(head_dim))


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention. `dtype` is float32, float16, q8 or q4."""

    @property
    def lanes(self) -> int:
        """Lanes of a vector over the dimensions of V."""
        return next(n for n in (16, 8, 4, 2, 1) if math.gcd(self.scale_dims, self.v_dim) // self.packed % n == 0)

    @property
    def stored(self) -> str:
        """The dtype of an element of K or V in a page."""
        return "int8" if self.dtype in QUANTIZED else self.dtype


@dataclass(frozen=True)
class Pages:
    """The pages argument of a function, as its elements and its scales (None where there are none)."""

    shape: AttentionShape
    elements: Buffer
    scales: Buffer | None = None

    @property
    def line(self) -> int:
        """Elements of a cache line of 64 bytes."""
        return 64 // self.shape.item_bytes

    def k(self, page: Expr, head: Expr) -> Expr:
        """Index of K[0, 0] of a head in `elements`; dimension d of slot i is d // packed * 16 + i further."""
        s = self.shape
        return (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // s.item_bytes)

    def v(self, page: Expr, head: Expr) -> Expr:
        """Index of V[0, 0]; the elements of slot i are i * v_dim / packed further."""
        return self.k(page, head) + PAGE * self.shape.head_dim // self.shape.packed

    def scale(self, page: Expr, head: Expr, of_v: int) -> Expr:
        """Index of the first scale of K (or V) in `scales`; that of group g and slot i is g * 16 + i further."""
        s = self.shape
        base = (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // 2)
        dims = s.head_dim + (0 if s.latent else s.v_dim)
        return base + PAGE * dims // s.packed // 2 + of_v * PAGE * s.scale_groups


def pages_tensor(shape: AttentionShape) -> Tensor:
    """The pages int8[P, page_bytes] of one layer that the runtime owns, as `Pages`."""
    count = tirx.Var("num_pages", "int64")
    views = [(count * (shape.page_bytes // shape.item_bytes), shape.stored)]
    if shape.scale_groups:
        views.append((count * (shape.page_bytes // 2), "float16"))
    return Tensor((count, shape.page_bytes), "int8", views, functools.partial(Pages, shape))


def qkv_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q, k, v of all rows: float32[rows, row_heads, head_dim], as a vector."""
    return _flat((rows, shape.row_heads, shape.head_dim))


def out_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """The output of attention: float32[rows, num_heads, v_dim], as a vector."""
    return _flat((rows, shape.num_heads, shape.v_dim))


def rows_argument(shape: AttentionShape, rows: Expr) -> dict[str, Tensor]:
    """The argument `rows` i32[rows] of functions for `picked_rows`; none for others."""
    return {"rows": Tensor((rows,), "int32")} if shape.picked_rows else {}


def sinks_argument(shape: AttentionShape) -> dict[str, Tensor]:
    """The argument `sinks` f32[num_heads] of functions that attend; none where heads have no sinks."""
    return {"sinks": Tensor((shape.num_heads,), "float32")} if shape.sinks else {}


def biases_argument(shape: AttentionShape) -> dict[str, Tensor]:
    """The argument `biases` f32[num_heads, n] as a vector; none where scores have no biases."""
    return {"biases": _flat((shape.num_heads, 2 * shape.distances + BIAS_MARGIN))} if shape.distances else {}


def _flat(dims: tuple[Expr, ...]) -> Tensor:
    return Tensor(dims, "float32", [(math.prod(dims), "float32")])
