"""Whole pages from place to place."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Tensor, function
from tir_schedules.cpu.vectors import read, store, value
from tir_schedules.op import by_hand

_MOVE = 32  # bytes moved at once; divides every page


def copy_pages(page_bytes: int) -> tirx.PrimFunc:
    """pairs i32[c, 2], pages int8[P, page_bytes]: page pairs[i, 1] = page pairs[i, 0], one pair after the other."""
    count, size = tirx.Var("num_pages", "int64"), page_bytes
    arguments = {
        "pairs": Tensor((tirx.Var("c", "int64"), 2), "int32"),
        "pages": Tensor((count, size), "int8", [(count * size, "int8")]),
    }

    def body(pairs: Buffer, data: Buffer) -> None:
        with I.serial(0, pairs.shape[0]) as c:
            source, target = (value(I.cast(pairs[c, i], "int64") * size) for i in range(2))
            with I.serial(0, size // _MOVE) as i:
                store(data, target + i * _MOVE, read(data, source + i * _MOVE, _MOVE), _MOVE)

    return by_hand({"copy_pages": function("copy_pages", arguments, body)}, page_bytes=page_bytes)["copy_pages"]
