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


def store_pages(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv f32[n, row_heads, D], step i32[k]: K and V of all rows to pages int8[P, page_bytes]."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    arguments = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), shape.page_group),
        "pages": pages_tensor(shape),
    }

    def body(qkv: Buffer, step: Step, pages: Pages) -> None:
        def token(t: Expr) -> None:
            with I.If(step.stores(t)), I.Then():
                page, slot = (value(x) for x in step.place(t))
                with I.serial(0, kv_heads) as h:
                    k = value((t * shape.row_heads + heads + h) * dim)
                    _store_k(shape, qkv, k, pages, page, slot, h)
                    if not shape.latent:
                        _store_v(shape, qkv, k + kv_heads * dim, pages, page, slot, h)

        for_tokens(n, token)

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
        shape.scale_groups,
        lambda d: (2 * d, 2 * d + 1),
    )


def _store_v(shape: AttentionShape, qkv: Buffer, source: Expr, pages: Pages, page: Expr, slot: Expr, h: Expr) -> None:
    """A row of V [16, D]."""
    at = value(pages.v(page, h) + slot * (shape.v_dim // shape.packed))
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
        shape.v_scale_groups,
        lambda d: (d, d + shape.scale_dims // 2),
    )


def for_tokens(count: Expr, body: Callable[[Expr], None]) -> None:
    """body(t) for every token, in parallel where there are many."""
    with I.If(count < _MANY_TOKENS):
        with I.Then(), I.serial(0, count) as t:
            body(t)
        with I.Else(), I.parallel(0, count) as t:
            body(t)


def _convert(x: Buffer, source: Expr, elements: Buffer, target: Expr, shape: AttentionShape) -> None:
    """elements[target:] = x[source : source + v_dim] in the dtype of pages."""
    with I.serial(0, shape.v_dim // shape.lanes) as i:
        item = read(x, source + i * shape.lanes, shape.lanes)
        store(elements, target + i * shape.lanes, I.cast(item, lanes_of(shape.stored, shape.lanes)), shape.lanes)


def _quantize(
    x: Buffer,
    source: Expr,
    put_element: Callable[[Expr, Expr, Expr], None],
    put_scale: Callable[[Expr, Expr], None],
    shape: AttentionShape,
    groups: int,
    pair: Callable[[Expr], tuple[Expr, Expr]],
) -> None:
    """One head's K or V of one token: put_element(i, d, element i + d), put_scale(g, scale of group g).

    `AttentionShape` states the error. NaN makes its scale NaN. `pair`: which dimensions of a group share a byte of q4.
    """
    size, levels = shape.scale_dims, (I.float32(-127), I.float32(127))
    if shape.dtype == "q4":
        levels = (I.float32(-8), I.float32(7))
    top = I.alloc_buffer((1,), "int32" if shape.dtype == "q8" else "uint32")
    scale_of = _scale_of_q8 if shape.dtype == "q8" else _scale_of_q4
    with I.serial(0, groups) as g:
        begin = source + g * size
        scale = scale_of(x, begin, size, top)
        put_scale(g, scale)
        step = value(I.cast(scale, "float32"))
        some = step > I.float32(0) if shape.dtype == "q8" else step != I.float32(0)
        inverse = value(I.if_then_else(some, I.float32(1) / step, I.float32(0)))

        def code(d: Expr) -> Expr:
            number = I.nearbyint(x[begin + d] * inverse)
            return I.cast(I.min(I.max(number, levels[0]), levels[1]), "int32")

        with I.serial(0, size // shape.packed) as d:
            element = code(d)
            if shape.dtype == "q4":
                low, high = (code(one) for one in pair(d))
                element = I.bitwise_or(I.bitwise_and(low, 15), I.shift_left(high, 4))
            put_element(g * (size // shape.packed), d, I.cast(element, "int8"))


def _scale_of_q8(x: Buffer, begin: Expr, size: int, top: Buffer) -> Expr:
    """float16: the largest of |x[begin : begin + size]| is 127 times it."""
    put(top, 0, 0)  # bits have the order of the numbers, and NaN is above them
    with I.serial(0, size) as d:
        put(top, 0, I.max(top[0], I.reinterpret("int32", I.fabs(x[begin + d]))))
    largest = I.reinterpret("float32", top[0])
    # min(a, b) is `a < b ? a : b`: with NaN as b, NaN.
    return value(I.cast(I.min(I.float32(65504), largest * I.float32(1 / 127)), "float16"))


def _scale_of_q4(x: Buffer, begin: Expr, size: int, top: Buffer) -> Expr:
    """float16: the number of largest magnitude of x[begin : begin + size], the negative one of two, is -8 times it."""
    one = I.uint32(1)
    put(top, 0, I.uint32(0))  # bits with the sign as the last one; NaN is above all numbers
    with I.serial(0, size) as d:
        bits = I.reinterpret("uint32", x[begin + d])
        put(top, 0, I.max(top[0], I.bitwise_or(I.shift_left(bits, one), I.shift_right(bits, I.uint32(31)))))
    largest = I.reinterpret("float32", I.shift_right(top[0], one))
    eighth = value(I.min(I.float32(65504), largest * I.float32(1 / 8)))  # min as above
    return value(I.cast(I.if_then_else(I.bitwise_and(top[0], one) == one, eighth, I.float32(0) - eighth), "float16"))
