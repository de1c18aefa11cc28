"""K and V of a step's rows to pages that the runtime owns, and whole pages from place to place."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, f32, function, put
from tir_schedules.gpu.attention.pages import AttentionShape, Pages, byte_pages_argument, for_each, qkv_argument
from tir_schedules.gpu.kernel import float_to_half, half_to_float, keep, local, nearest, pin
from tir_schedules.op import by_hand
from tir_schedules.paged import PAGE, QUANTIZED
from tir_schedules.step import Step, step_argument

INFINITY_BITS = 0x7F800000


def store_pages(shape: AttentionShape) -> tirx.PrimFunc:
    """qkv [n, row_heads, D], step i32[k]: K and V of every row to its slot of pages int8[P, page_bytes]."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), shape.page_group),
        "pages": byte_pages_argument(shape),
    }

    def body(qkv: Buffer, step: Step, pages: Pages) -> None:
        if shape.dtype in QUANTIZED:
            _quantize(shape, qkv, step, pages, n)
            return

        def element(i: Expr) -> None:
            t, head, d = keep(i // (kv_heads * dim)), keep(i // dim % kv_heads), keep(i % dim)
            with I.If(step.stores(t)), I.Then():
                page, slot = (keep(x) for x in step.place(t))
                put(pages.data, pages.k(page, head, slot, d), qkv[t, heads + head, d])
                if not shape.value_dim:
                    put(pages.data, pages.v(page, head, slot, d), qkv[t, heads + kv_heads + head, d])
                elif not shape.latent:
                    with I.If(d < shape.v_dim), I.Then():
                        put(pages.data, pages.v(page, head, slot, d), qkv[t, heads + kv_heads + head, d])

        for_each(n * (kv_heads * dim), element)

    return function("store_pages", arguments, body)


def _quantize(shape: AttentionShape, qkv: Buffer, step: Step, pages: Pages, n: Expr) -> None:
    """Store codes. An invocation has a group of dimensions of K or V, of up to four rows, which share words."""
    heads, kv_heads, groups = shape.num_heads, shape.num_kv_heads, shape.scale_groups
    items = (1 if shape.latent else 2) * kv_heads * groups

    def word(t: Expr) -> Expr:
        """What rows have in common that share words; -1 of a row that goes nowhere."""
        page, slot = step.place(t)
        return keep(I.if_then_else(step.stores(t), page * (PAGE // 4) + slot // 4, -1))

    def group(i: Expr) -> None:
        t, part = keep(i // items), keep(i % items)
        of_v, head, g = keep(part // (kv_heads * groups)), keep(part // groups % kv_heads), keep(part % groups)
        own = word(t)
        mine = own >= 0
        if shape.value_dim and not shape.latent:
            mine = I.And(mine, I.Or(of_v == 0, g < shape.v_scale_groups))
        for j in (1, 2, 3):  # the first of these rows has them all
            mine = I.And(mine, I.Or(t < j, word(I.max(t - j, 0)) != own))
        count = I.min(4, I.cast(n, "int32") - t)
        with I.If(mine), I.Then(), I.serial(0, count) as j, I.If(word(t + j) == own), I.Then():
            _quantize_row(pages, qkv, (t + j, heads + of_v * kv_heads + head), step.place(t + j), (head, g), of_v)

    for_each(n * items, group)


def _quantize_row(
    pages: Pages, qkv: Buffer, source: tuple[Expr, Expr], where: tuple[Expr, Expr], part: tuple[Expr, Expr], of_v: Expr
) -> None:
    """Codes and scale of one group of dimensions of qkv[source]; NaN makes the scale NaN."""
    shape, data = pages.shape, pages.data
    (row, line), (page, slot), (head, g) = source, map(keep, where), part
    top, size = local(1, "int32"), shape.scale_dims  # bits have the order of the numbers, and NaN is above them
    lowest, highest = (-8, 7) if shape.dtype == "q4" else (-127, 127)
    negative = local(1, "int32") if shape.dtype == "q4" else None  # the bits of the smallest number
    put(top, 0, 0)
    if negative is not None:
        put(negative, 0, 0)
    with I.serial(0, size) as i:
        bits = I.reinterpret("int32", pin(f32(qkv[row, line, g * size + i])))
        put(top, 0, I.max(top[0], I.bitwise_and(bits, 0x7FFFFFFF)))
        if negative is not None:
            put(negative, 0, I.max(negative[0], I.if_then_else(bits < 0, I.bitwise_and(bits, 0x7FFFFFFF), 0)))
    largest = I.min(I.reinterpret("float32", I.min(top[0], INFINITY_BITS)), I.float32(-lowest * 65504))
    half = pin(I.if_then_else(top[0] > INFINITY_BITS, 0x7E00, float_to_half(keep(largest * I.float32(-1 / lowest)))))
    if negative is not None:  # the number of largest magnitude has the lowest code
        half = pin(I.if_then_else(negative[0] == top[0], half, I.bitwise_or(half, 0x8000)))
    at = keep(pages.scales(page, head, slot, of_v) + g * PAGE)
    _replace(data, at // 2, at % 2 * 16, half, 0xFFFF)
    scale = pin(half_to_float(half, signed=negative is not None))
    some = scale > I.float32(0) if negative is None else scale != I.float32(0)
    inverse = pin(I.if_then_else(some, I.float32(1) / scale, I.float32(0)))
    with I.serial(0, size) as i:
        d = keep(g * size + i)
        number = I.min(I.max(f32(qkv[row, line, d]) * inverse, I.float32(lowest)), I.float32(highest))
        at = I.if_then_else(of_v == 0, pages.k(page, head, slot, d), pages.v(page, head, slot, d))
        (_, k_up), (v_byte, v_up) = shape.k_byte(d), shape.v_byte(d)
        shift = I.if_then_else(of_v == 0, slot % 4, v_byte % 4) * 8
        if negative is not None:
            shift = shift + I.if_then_else(of_v == 0, k_up, v_up)
        _replace(data, at, shift, nearest(number), 0xFF if negative is None else 0xF)


def _replace(words: Buffer, index: Expr, shift: Expr, value: Expr, mask: int) -> None:
    """The bits of `mask`, `shift` bits up in an int32 word, become those of a value."""
    index, shift = pin(index), pin(shift)
    others = I.bitwise_and(words[index], I.bitwise_not(I.shift_left(I.int32(mask), shift)))
    put(words, index, I.bitwise_or(others, I.shift_left(I.bitwise_and(value, mask), shift)))


def copy_pages(page_bytes: int) -> tirx.PrimFunc:
    """pairs i32[c, 2], pages int8[P, page_bytes]: page pairs[i, 1] = page pairs[i, 0], one pair after the other."""
    count, words = tirx.Var("num_pages", "int64"), page_bytes // 4
    arguments: dict[str, Argument] = {
        "pairs": Tensor((tirx.Var("c", "int64"), 2), "int32"),
        "pages": Tensor((count, page_bytes), "int8", [(count * words, "uint32")]),
    }

    def body(pairs: Buffer, data: Buffer) -> None:
        def word(i: Expr) -> None:
            with I.serial(0, I.cast(pairs.shape[0], "int32")) as c:
                put(data, pairs[c, 1] * words + i, data[pairs[c, 0] * words + i])

        for_each(words, word)

    return by_hand({"copy_pages": function("copy_pages", arguments, body)}, page_bytes=page_bytes)["copy_pages"]
