"""Decode rows times a packed weight, with their low-rank adapters; rules make the kernel like that of the product."""

from __future__ import annotations

from tvm import tirx

from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.cpu.int8_adapters import adapters_fit
from tir_schedules.cpu.matmul import Tile, matmul
from tir_schedules.cpu.packed_weight import packed_of
from tir_schedules.op import Op, by_hand
from tir_schedules.rule import Declined


def adapted_matmul(product: Op, shape: AdapterShape, activation: str = "") -> tirx.PrimFunc | None:
    """(x f32[m, K], packed W, step, a, b, scale, y f32[m, N], or [m, N / 2] with an activation of its gate).

    None for products that have no such kernel: those of a prompt's rows, or with an x that A does not fit.
    """
    if product.many_rows or not adapters_fit(packed_of(product), shape):
        return None
    facts = {**product.facts, **shape.facts} | ({"activation": activation} if activation else {})
    kernel = matmul(Op("adapted_matmul", facts), Tile())
    return None if isinstance(kernel, Declined) else by_hand({"adapted_matmul": kernel}, "", **facts)["adapted_matmul"]
