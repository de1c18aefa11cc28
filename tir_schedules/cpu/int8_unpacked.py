"""Columns of a weight as signed bytes in scratch, and how vectors of 16-bit products become them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.vectors import Registers, store

GROUP = 32  # of weights
FRACTION = 256  # factors are 8.8 fixed point: the byte is the upper half of a 16-bit product


class Bytes(Protocol):
    """Takes signed bytes of columns, in slots of `size` of K, and their scales f32[slot, block, 16]."""

    @property
    def scales(self) -> Buffer: ...

    @property
    def size(self) -> int: ...

    def put_eight(self, i: Expr, b: Expr, v: Expr, half: Registers) -> None:
        """The i-th eight bytes of the v-th vector of rows of a block, from two vectors of words."""


@dataclass(frozen=True)
class Unpacked:
    """Scratch for columns as signed bytes, in slots of `size` of K: words uint32[word, block, 16].

    scales f32[slot, block, 16]. With a `side` of 2 two words of a row are neighbors: uint32[word / 2, block, 32].
    """

    words: Buffer
    scales: Buffer
    size: int
    side: int = 1

    def put_eight(self, i: Expr, b: Expr, v: Expr, half: Registers) -> None:
        """The i-th eight bytes of the v-th vector of rows of a block, from two vectors of words."""
        lanes = half.lanes
        if self.side == 1:
            with I.unroll(2) as h:
                store(self.words, (i * 2 + h, b, v * lanes), half[h], lanes)
        else:
            both = tirx.Shuffle([half[0], half[1]], alternating(lanes))
            store(self.words, (i, b, v * 2 * lanes), both, 2 * lanes)


def alternating(lanes: int) -> list[int]:
    """The lanes of two vectors, interleaved."""
    return [lane + lanes * which for lane in range(lanes) for which in range(2)]


def upper_bytes(even: tirx.PrimExpr, odd: tirx.PrimExpr, dot: Dot) -> tirx.PrimExpr:
    """The upper bytes of int16 numbers as uint32[lanes], those of `even` in the lower halves of 16 bits."""
    if dot.kind.startswith("neon"):  # one trn2
        width = 4 * dot.lanes
        bytes_ = [I.reinterpret(x, dtype=f"int8x{width}") for x in (even, odd)]
        taken = [i + which * width for i in range(1, width, 2) for which in range(2)]
        return I.reinterpret(tirx.Shuffle(bytes_, taken), dtype=f"uint32x{dot.lanes}")
    even, odd = (I.reinterpret(x, dtype=f"uint32x{dot.lanes}") for x in (even, odd))
    return I.bitwise_or(
        I.bitwise_and(
            I.shift_right(even, I.broadcast(I.uint32(8), dot.lanes)), I.broadcast(I.uint32(0x00FF00FF), dot.lanes)
        ),
        I.bitwise_and(odd, I.broadcast(I.uint32(0xFF00FF00), dot.lanes)),
    )


def halves(x: Expr, lanes: int) -> Expr:
    """Reinterpret 32-bit lanes as pairs of 16-bit lanes."""
    return I.reinterpret(f"int16x{2 * lanes}", x)
