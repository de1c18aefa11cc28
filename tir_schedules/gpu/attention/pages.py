"""Pages of the KV cache on GPUs: what a page holds, and the arguments of functions that attend.

A page holds 16 tokens. For each KV head it has K transposed, [head_dim, 16], so that 16 neighbouring invocations read
16 neighbouring keys; then V, [16, v_dim], unless it is `latent`; and for q8 the scales of K and of V, float16
[groups, 16] each. Of q4 a byte has two codes, so that K is [head_dim / 2, 16] and V [16, v_dim / 2]; `paged.py` says
which two. Kernels see pages of q8 and q4 as 32-bit words, as not every GPU has smaller integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, f32
from tir_schedules.gpu.kernel import ceildiv, half_to_float, keep, launch, pin
from tir_schedules.paged import ITEM_BITS, PAGE, QUANTIZED, Heads, has_q4

_THREADS = 256
MAX_ROW_PARTS = 1024  # parts of rows that the workspace of `attend_few` holds; a row has 128 at most


ACTIVATION_DTYPES = ("float32", "float16")


def kv_dtypes(activation_dtype: str, head_dim: int, own_pages: bool) -> tuple[str, ...]:
    """How K and V can be kept: in the dtype of the activations or, four bytes in a word, as codes."""
    if not own_pages or head_dim % 4:
        return (activation_dtype,)
    return (activation_dtype, *(dtype for dtype in QUANTIZED if dtype != "q4" or has_q4(head_dim)))


@dataclass(frozen=True)
class AttentionShape(Heads):
    """Static facts of a model's attention. `dtype` is q8, q4, or that of queries and outputs.

    `subgroup`: lanes of a subgroup, 0 if unknown; `shuffled`: as in `packed_loads.Xs`; `mma`: decode has matrix units.
    """

    subgroup: int = 0
    shuffled: bool = False
    mma: bool = False

    @property
    def row_dtype(self) -> str:
        """The dtype of queries, outputs, and new keys and values."""
        return self.activation_dtype if self.dtype in QUANTIZED else self.dtype

    @property
    def sum_heads(self) -> int:
        """Heads of TVM's queries and outputs, after the others, that say the sums of these: see `scores.store_sum`."""
        return 2 * ceildiv(self.num_heads, self.head_dim) if self.sinks else 0

    @property
    def workspace(self) -> tuple[int, ...]:
        return tuple(MAX_ROW_PARTS * self.num_heads * numbers for numbers in (self.v_dim, 2))

    def k_byte(self, d: Expr) -> tuple[Expr, Expr]:
        """Which byte of a token's K has the code of dimension d, and how many bits up."""
        return (d, 0) if self.packed == 1 else (d // 2, d % 2 * 4)

    def v_byte(self, d: Expr) -> tuple[Expr, Expr]:
        """Which byte of a token's V has the code of dimension d, and how many bits up."""
        if self.packed == 1:
            return d, 0
        half = self.scale_dims // 2
        return d // self.scale_dims * half + d % half, d // half % 2 * 4


@dataclass(frozen=True)
class Row:
    """K or V of a token in a head. Dimension d is element `first` + d * `stride` of `data`.

    q8 and q4: `data` are words, with bytes of four tokens of K, this one's `shift` bits up, or four of a token's V;
    `stride` is between bytes of K, and scale g is float16 number `scales` + 16 g.
    """

    shape: AttentionShape
    data: Buffer
    first: Expr
    stride: int = 1
    shift: Expr | None = None
    scales: Expr | None = None

    def moved(self, move: Callable[[Expr], Expr]) -> Row:
        """The row at `move(index)` for each of its indices: that of another lane."""
        shift, scales = (None if one is None else pin(move(one)) for one in (self.shift, self.scales))
        return replace(self, first=pin(move(self.first)), shift=shift, scales=scales)

    def scale(self, d: Expr) -> Expr:
        """float32 scale of dimension d; 1 where there are none."""
        if self.scales is None:
            return 1
        at = self.scales + d // self.shape.scale_dims * PAGE
        return half_to_float(keep(half_of(self.data, at)), signed=self.shape.dtype == "q4", finite=False)

    def number(self, d: Expr, scale: Expr) -> Expr:
        """float32 number of dimension d, whose scale is known."""
        if self.scales is None:
            return f32(self.data[self.first + d * self.stride])
        if self.shift is not None:
            at, up = self.shape.k_byte(d)
            word, shift = self.data[self.first + at * self.stride], self.shift + up
        else:
            at, up = self.shape.v_byte(d)
            word, shift = self.data[self.first + at // 4], at % 4 * 8 + up
        unused = 32 - ITEM_BITS[self.shape.dtype]
        return f32(I.shift_right(I.shift_left(word, unused - shift), I.int32(unused))) * scale

    def at(self, d: Expr) -> Expr:
        """float32 number of dimension d."""
        return self.number(d, self.scale(d))


def half_of(words: Buffer, at: Expr) -> Expr:
    """The 16 bits of a number of int32 words that are pairs of float16."""
    return I.bitwise_and(I.shift_right(words[at // 2], at % 2 * 16), 0xFFFF)


def for_dims(rows: Sequence[Row], body: Callable[[Expr, list[Expr]], None]) -> None:
    """body(d, numbers of the rows in dimension d) for every dimension, one after another."""
    shape = rows[0].shape
    if rows[0].scales is None:
        with I.serial(0, shape.head_dim) as d:
            body(d, [keep(row.at(d)) for row in rows])
        return
    with I.serial(0, shape.scale_groups) as g:
        scales = [pin(row.scale(g * shape.scale_dims)) for row in rows]
        with I.serial(0, shape.scale_dims) as i:
            d = keep(g * shape.scale_dims + i)
            body(d, [keep(row.number(d, scale)) for row, scale in zip(rows, scales)])


@dataclass(frozen=True)
class Pages:
    """The pages as one vector: [page, kv head, K or V, ...]."""

    shape: AttentionShape
    data: Buffer

    @property
    def items(self) -> int:
        """Stored items of K or V, bytes where they are quantized, in an element of `data`."""
        return 4 if self.shape.dtype in QUANTIZED else 1

    def _head(self, page: Expr, head: Expr) -> Expr:
        size = self.shape.head_bytes // (self.items * self.shape.item_bytes)
        return (page * self.shape.num_kv_heads + head) * size

    def k(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of the element with a number of K."""
        return self._head(page, head) + self.shape.k_byte(d)[0] * (PAGE // self.items) + slot // self.items

    def v(self, page: Expr, head: Expr, slot: Expr, d: Expr) -> Expr:
        """Index of the element with a number of V."""
        k_dim, v_dim = (dim // self.shape.packed // self.items for dim in (self.shape.head_dim, self.shape.v_dim))
        return self._head(page, head) + PAGE * k_dim + slot * v_dim + self.shape.v_byte(d)[0] // self.items

    def scales(self, page: Expr, head: Expr, slot: Expr, of_v: Expr) -> Expr | None:
        """Index of the first float16 scale of K (or V) of a token; None where there are none."""
        if self.items == 1:
            return None
        shape = self.shape
        codes = (shape.head_dim + (0 if shape.latent else shape.v_dim)) // shape.packed  # pairs of them
        return self._head(page, head) * 2 + PAGE * (codes // 2 + of_v * shape.scale_groups) + slot

    def key(self, page: Expr, head: Expr, slot: Expr) -> Row:
        """K of a token."""
        first, scales = pin(self.k(page, head, slot, 0)), self.scales(page, head, slot, 0)
        if scales is None:
            return Row(self.shape, self.data, first, PAGE)
        return Row(self.shape, self.data, first, PAGE // 4, pin(slot % 4 * 8), pin(scales))

    def value(self, page: Expr, head: Expr, slot: Expr) -> Row:
        """V of a token, which may be the beginning of its K."""
        if self.shape.latent:
            return self.key(page, head, slot)
        first, scales = pin(self.v(page, head, slot, 0)), self.scales(page, head, slot, 1)
        return Row(self.shape, self.data, first, scales=None if scales is None else pin(scales))


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
    dtype = "int32" if shape.dtype in QUANTIZED else shape.dtype
    elements = count * (shape.page_bytes // (2 if dtype == "float16" else 4))
    return Tensor((count, shape.page_bytes), "int8", [(elements, dtype)], lambda data: Pages(shape, data))


def heads_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Output [rows, num_heads, v_dim]."""
    return Tensor((rows, shape.num_heads, shape.v_dim), shape.row_dtype)


def cache_heads_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """q or output of TVM's cache [rows, num_heads + sum_heads, head_dim]."""
    return Tensor((rows, shape.num_heads + shape.sum_heads, shape.head_dim), shape.row_dtype)


def qkv_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Rows of queries, keys and values [rows, row_heads, head_dim]."""
    return Tensor((rows, shape.row_heads, shape.head_dim), shape.row_dtype)


def kv_argument(shape: AttentionShape, *rows: Expr) -> Tensor:
    """k or v of new tokens [..., kv_heads, head_dim]."""
    return Tensor((*rows, shape.num_kv_heads, shape.head_dim), shape.dtype)


def sums_argument(shape: AttentionShape, rows: Expr) -> Tensor:
    """Log-sum-exps in base 2: f32[rows, num_heads + sum_heads], of which the last hold nothing."""
    return Tensor((rows, shape.num_heads + shape.sum_heads), "float32")


def rows_argument(shape: AttentionShape, rows: Expr) -> dict[str, Tensor]:
    """The argument `rows` i32[rows] of functions for `picked_rows`; none for others."""
    return {"rows": Tensor((rows,), "int32")} if shape.picked_rows else {}


def sinks_argument(shape: AttentionShape) -> dict[str, Tensor]:
    """The argument `sinks` f32[num_heads] of functions that attend; none where heads have no sinks."""
    return {"sinks": Tensor((shape.num_heads,), "float32")} if shape.sinks else {}


def index_argument(*dims: Expr) -> Tensor:
    """Indices or positions: TVM passes all of them as slices of one buffer."""
    return Tensor(dims, "int32", offset=True)


def for_each(count: Expr, body: Callable[[Expr], None]) -> None:
    """body(i) for i < count, one invocation for each."""
    with launch(_THREADS, ceildiv(count, _THREADS)) as (bx, _, tx):
        i = keep(bx * _THREADS + tx)
        with I.If(i < I.cast(count, "int32")), I.Then():
            body(i)
