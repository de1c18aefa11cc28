"""K and V of a step's rows to pages that the runtime owns, and whole pages from place to place."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, function, put
from tir_schedules.gpu.attention.pages import AttentionShape, Pages, byte_pages_argument, for_each, qkv_argument
from tir_schedules.gpu.kernel import keep
from tir_schedules.step import Step, step_argument


def store_pages(shape: AttentionShape, window: int) -> tirx.PrimFunc:
    """qkv [n, heads + 2 kv_heads, D], step i32[k]: K and V of every row to its slot of pages int8[P, page_bytes]."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    n = tirx.Var("n", "int64")
    arguments: dict[str, Argument] = {
        "qkv": qkv_argument(shape, n),
        "step": step_argument(tirx.Var("k", "int64"), window > 0),
        "pages": byte_pages_argument(shape),
    }

    def body(qkv: Buffer, step: Step, pages: Pages) -> None:
        def element(i: Expr) -> None:
            t, head, d = keep(i // (kv_heads * dim)), keep(i // dim % kv_heads), keep(i % dim)
            with I.If(step.stores(t)), I.Then():
                page, slot = (keep(x) for x in step.slot(t))
                put(pages.data, pages.k(page, head, slot, d), qkv[t, heads + head, d])
                put(pages.data, pages.v(page, head, slot, d), qkv[t, heads + kv_heads + head, d])

        for_each(n * (kv_heads * dim), element)

    return function("store_pages", arguments, body)


def copy_pages(shape: AttentionShape) -> tirx.PrimFunc:
    """pairs i32[c, 2], pages int8[P, page_bytes]: page pairs[i, 1] = page pairs[i, 0], one pair after the other."""
    count, words = tirx.Var("num_pages", "int64"), shape.page_bytes // 4
    arguments: dict[str, Argument] = {
        "pairs": Tensor((tirx.Var("c", "int64"), 2), "int32"),
        "pages": Tensor((count, shape.page_bytes), "int8", [(count * words, "uint32")]),
    }

    def body(pairs: Buffer, data: Buffer) -> None:
        def word(i: Expr) -> None:
            with I.serial(0, I.cast(pairs.shape[0], "int32")) as c:
                put(data, pairs[c, 1] * words + i, data[pairs[c, 0] * words + i])

        for_each(words, word)

    return function("copy_pages", arguments, body)
