"""Pages of the KV cache on GPUs: what a page holds, and the arguments of functions that attend.

A page holds 16 tokens. For each KV head it has K transposed, [head_dim, 16], so that 16 neighbouring invocations read
16 neighbouring keys; then V, [16, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.paged import PAGE, Heads

_THREADS = 256
MAX_ROW_PARTS = 1024  # parts of rows that the workspace of `attend_few` holds; a row has 128 at most


ACTIVATION_DTYPES = ("float32", "float16")


def kv_dtypes(activation_dtype: str) -> tuple[str, ...]:
    """Dtypes for K and V: that of the activations, in which kernels read them."""
    return (activation_dtype,)


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention. `dtype` is that of queries, outputs and the cache.

    `subgroup`: lanes of a subgroup, 0 if unknown; `shuffled`: as in `packed_loads.Xs`.
    """

    subgroup: int = 0
    shuffled: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer of the cache."""
        return 2 * self.num_kv_heads * self.head_dim * (2 if self.dtype == "float16" else 4)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return PAGE * self.bytes_per_token

    @property
    def workspace(self) -> tuple[int, ...]:
        return tuple(MAX_ROW_PARTS * self.num_heads * numbers for numbers in (self.head_dim, 2))


@dataclass(frozen=True)
class Pages:
    """The pages as one vector: [page, kv head, K or V, ...]."""

    shape: AttentionShape
    data: Buffer

    def _head(self, page: Expr, head: Expr) -> Expr:
        return (page * self.shape.num_kv_heads + head) * (2 * PAGE * self.shape.head_dim)

    def k(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of an element of K."""
        return self._head(page, head) + d * PAGE + slot

    def v(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of an element of V."""
        return self._head(page, head) + PAGE * self.shape.head_dim + slot * self.shape.head_dim + d


def pages_argument(shape: AttentionShape) -> Tensor:
    """TVM's [P, 2, kv_heads, 16, head_dim]; kernels index it through `flat_pages`."""
    count = tirx.Var("num_pages", "int64")
    return Tensor((count, 2, shape.num_kv_heads, PAGE, shape.head_dim), shape.dtype)


def flat_pages(shape: AttentionShape, buffer: Buffer) -> Pages:
    """The pages argument of a kernel."""
    size = 2 * shape.num_kv_heads * PAGE * shape.head_dim
    flat = I.decl_buffer((buffer.shape[0] * size,), shape.dtype, data=buffer.data)
    return Pages(shape, flat)


def byte_pages_argument(shape: AttentionShape) -> Tensor:
    """Pages that the runtime owns, int8[P, page_bytes], as `Pages`."""
    count = tirx.Var("num_pages", "int64")
    elements = count * (2 * shape.num_kv_heads * PAGE * shape.head_dim)
    return Tensor((count, shape.page_bytes), "int8", [(elements, shape.dtype)], lambda data: Pages(shape, data))


def heads_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q or output [rows, num_heads, head_dim]."""
    return Tensor((rows, shape.num_heads, shape.head_dim), shape.dtype)


def qkv_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Rows of queries, keys and values [rows, num_heads + 2 num_kv_heads, head_dim]."""
    return Tensor((rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim), shape.dtype)


def kv_argument(shape: AttentionShape, *rows: Expr) -> Tensor:
    """k or v of new tokens [..., kv_heads, head_dim]."""
    return Tensor((*rows, shape.num_kv_heads, shape.head_dim), shape.dtype)


def sums_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Log-sum-exps in base 2: f32[rows, num_heads]."""
    return Tensor((rows, shape.num_heads), "float32")


def index_argument(*dims: Expr) -> Tensor:
    """Indices or positions: TVM passes all of them as slices of one buffer."""
    return Tensor(dims, "int32", offset=True)


def for_each(count: Expr, body: Callable[[Expr], None]) -> None:
    """body(i) for i < count, one invocation for each."""
    with launch(_THREADS, ceildiv(count, _THREADS)) as (bx, _, tx):
        i = keep(bx * _THREADS + tx)
        with I.If(i < I.cast(count, "int32")), I.Then():
            body(i)
