"""K and V of a step's rows to their pages."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, function, put
from tir_schedules.cpu.attention.pages import AttentionShape, Pages, pages_tensor, qkv_argument
from tir_schedules.cpu.vectors import lanes_of, read, store, value
from tir_schedules.paged import PAGE
from tir_schedules.step import Step, step_argument

# With fewer tokens, starting a second thread costs more than it saves.
_MANY_TOKENS = 16


def store_pages(shape: AttentionShape, window: int) -> tirx.PrimFunc:
    """qkv f32[n, heads + 2 kv_heads, D], step i32[k]: K and V of every row to its slot of pages int8[P, page_bytes]."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    arguments = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), window > 0),
        "pages": pages_tensor(shape),
    }

    def body(qkv: Buffer, step: Step, pages: Pages) -> None:
        def token(t: Expr) -> None:
            with I.If(step.stores(t)), I.Then():
                page, slot = (value(x) for x in step.slot(t))
                with I.serial(0, kv_heads) as h:
                    k = value((t * (heads + 2 * kv_heads) + heads + h) * dim)
                    _store_k(shape, qkv, k, pages, page, slot, h)
                    _store_v(shape, qkv, k + kv_heads * dim, pages, page, slot, h)

        _for_tokens(n, token)

    return function("store_pages", arguments, body)


def _store_k(shape: AttentionShape, qkv: Buffer, source: Expr, pages: Pages, page: Expr, slot: Expr, h: Expr) -> None:
    """A column of K [D, 16]."""
    at = value(pages.k(page, h) + slot)
    if pages.scales is None:
        with I.serial(0, shape.head_dim) as d:
            put(pages.elements, at + d * PAGE, qkv[source + d])
        return
    first = value(pages.scale(page, h, 0) + slot)
    _quantize(
        qkv,
        source,
        lambda i, d, code: put(pages.elements, at + (i + d) * PAGE, code),
        lambda g, scale: put(pages.scales, first + g * PAGE, scale),
        shape,
    )


def _store_v(shape: AttentionShape, qkv: Buffer, source: Expr, pages: Pages, page: Expr, slot: Expr, h: Expr) -> None:
    """A row of V [16, D]."""
    at = value(pages.v(page, h) + slot * shape.head_dim)
    if pages.scales is None:
        _convert(qkv, source, pages.elements, at, shape)
        return
    first = value(pages.scale(page, h, 1) + slot)
    _quantize(
        qkv,
        source,
        lambda i, d, code: put(pages.elements, at + i + d, code),
        lambda g, scale: put(pages.scales, first + g * PAGE, scale),
        shape,
    )


def _for_tokens(count: Expr, body: Callable[[Expr], None]) -> None:
    """body(t) for every token, in parallel where there are many."""
    with I.If(count < _MANY_TOKENS):
        with I.Then(), I.serial(0, count) as t:
            body(t)
        with I.Else(), I.parallel(0, count) as t:
            body(t)


def _convert(x: Buffer, source: Expr, elements: Buffer, target: Expr, shape: AttentionShape) -> None:
    """elements[target:] = x[source : source + head_dim] in the dtype of pages."""
    with I.serial(0, shape.head_dim // shape.lanes) as i:
        item = read(x, source + i * shape.lanes, shape.lanes)
        store(elements, target + i * shape.lanes, I.cast(item, lanes_of(shape.stored, shape.lanes)), shape.lanes)


def _quantize(
    x: Buffer,
    source: Expr,
    put_code: Callable[[Expr, Expr, Expr], None],
    put_scale: Callable[[Expr, Expr], None],
    shape: AttentionShape,
) -> None:
    """One head's K or V of one token: put_code(i, d, code of dimension i + d), put_scale(g, scale of group g).

    `AttentionShape` states the error. NaN makes its scale NaN.
    """
    size = shape.head_dim // shape.scale_groups
    top = I.alloc_buffer((1,), "int32")  # bits have the order of the numbers, and NaN is above them
    with I.serial(0, shape.scale_groups) as g:
        put(top, 0, 0)
        with I.serial(0, size) as d:
            put(top, 0, I.max(top[0], I.reinterpret("int32", I.fabs(x[source + g * size + d]))))
        largest = I.reinterpret("float32", top[0])
        # min(a, b) is `a < b ? a : b`: with NaN as b, NaN.
        scale = value(I.cast(I.min(I.float32(65504), largest * I.float32(1 / 127)), "float16"))
        put_scale(g, scale)
        step = value(I.cast(scale, "float32"))
        inverse = value(I.if_then_else(step > I.float32(0), I.float32(1) / step, I.float32(0)))
        with I.serial(0, size) as d:
            code = I.nearbyint(x[source + g * size + d] * inverse)
            code = I.min(I.max(code, I.float32(-127)), I.float32(127))
            put_code(g * size, d, I.cast(I.cast(code, "int32"), "int8"))
