"""The layout of pages of the KV cache on CPUs, and how arguments of functions over pages view memory.

The runtime owns the pages, as bytes; every function views them with their real dtypes. Queries and outputs are float32.

A page holds 16 tokens. For each KV head it contains, one after another: K transposed, [head_dim, 16], so that one
vector load has the same dimension of 16 keys; V, [16, head_dim]; and for q8 the scales of K and of V, float16
[groups, 16] each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor
from tir_schedules.paged import PAGE, Heads

FORMATS = ("float32", "float16", "q8")
_ITEM_BYTES = {"float32": 4, "float16": 2, "q8": 1}
ACTIVATION_DTYPES = ("float32",)


def kv_dtypes(activation_dtype: str) -> tuple[str, ...]:
    """How K and V can be kept."""
    return FORMATS


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention.

    `dtype` is float32, float16 or q8: int8 codes c with one float16 scale s for each group of 32 dimensions of a
    token's K or V in a head (all of them, where head_dim is no multiple of 32), x ~ c s, s = max|x| / 127. Then
    |x - c s| <= 0.004 max|x| + 4e-6 for max|x| <= 8e6, the second term for scales that are subnormal in float16.
    """

    @property
    def lanes(self) -> int:
        """Lanes of a vector over the head dimension."""
        return next(n for n in (16, 8, 4, 2, 1) if self.head_dim % n == 0)

    @property
    def stored(self) -> str:
        """The dtype of an element of K or V in a page."""
        return "int8" if self.dtype == "q8" else self.dtype

    @property
    def scale_groups(self) -> int:
        """Scales of one token's K (or V) in a head; 0 where there are none."""
        return 0 if self.dtype != "q8" else max(1, self.head_dim // 32 if self.head_dim % 32 == 0 else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in a head."""
        return self.head_dim * _ITEM_BYTES[self.dtype] + 2 * self.scale_groups

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page."""
        return 2 * PAGE * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer of the cache."""
        return 2 * self.num_kv_heads * self.row_bytes


@dataclass(frozen=True)
class Pages:
    """The pages argument of a function, as its elements and its scales (None where there are none)."""

    shape: AttentionShape
    elements: Buffer
    scales: Buffer | None = None

    @property
    def line(self) -> int:
        """Elements of a cache line of 64 bytes."""
        return 64 // _ITEM_BYTES[self.shape.dtype]

    def k(self, page: Expr, head: Expr) -> Expr:
        """Index of K[0, 0] of a head in `elements`; dimension d of slot i is d * 16 + i further."""
        s = self.shape
        return (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // _ITEM_BYTES[s.dtype])

    def v(self, page: Expr, head: Expr) -> Expr:
        """Index of V[0, 0]; dimension d of slot i is i * head_dim + d further."""
        return self.k(page, head) + PAGE * self.shape.head_dim

    def scale(self, page: Expr, head: Expr, of_v: int) -> Expr:
        """Index of the first scale of K (or V) in `scales`; that of group g and slot i is g * 16 + i further."""
        s = self.shape
        base = (I.cast(page, "int64") * s.num_kv_heads + head) * (s.head_bytes // 2)
        return base + PAGE * s.head_dim + of_v * PAGE * s.scale_groups


def pages_tensor(shape: AttentionShape) -> Tensor:
    """The pages int8[P, page_bytes] of one layer that the runtime owns, as `Pages`."""
    count = tirx.Var("num_pages", "int64")
    views = [(count * (shape.page_bytes // _ITEM_BYTES[shape.dtype]), shape.stored)]
    if shape.scale_groups:
        views.append((count * (shape.page_bytes // 2), "float16"))
    return Tensor((count, shape.page_bytes), "int8", views, functools.partial(Pages, shape))


def qkv_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q, k, v of all rows: float32[rows, num_heads + 2 num_kv_heads, head_dim], as a vector."""
    heads = shape.num_heads + 2 * shape.num_kv_heads
    return _flat((rows, heads, shape.head_dim))


def out_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """What attention gives: float32[rows, num_heads, head_dim], as a vector."""
    return _flat((rows, shape.num_heads, shape.head_dim))


def _flat(dims: tuple[Expr, ...]) -> Tensor:
    return Tensor(dims, "float32", [(math.prod(dims), "float32")])
