"""Intel's tile registers (AMX) in TVM's IR builder: eight tiles of 16 rows of 64 bytes, and their products.

A tile of the first factor has numbers of K side by side; of the second, four bytes (two bfloat16) of K side by side
and then the columns, so 16 rows of it are 64 bytes of K. Intel SDM, volume 1, chapter 18. The tiles belong to a
thread: a loop's body that may run in another thread configures them, and releases them at its end. The process must
have asked the system for them before (`mlcpipe/host/cpu_features.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.vectors import scratch

ROWS = 16  # of a tile, and 32-bit columns of a sum or of a second factor
TILES = 8
# What of the factors is signed, or bfloat16 -> the instruction.
PRODUCTS = {"ss": "tdpbssd", "su": "tdpbsud", "us": "tdpbusd", "uu": "tdpbuud", "bf16": "tdpbf16ps"}


def _evaluate(name: str, *args: Expr) -> None:
    intrinsic = I.llvm_lookup_intrinsic_id(f"llvm.x86.{name}")
    I.evaluate(I.call_llvm_intrin(intrinsic, *args, dtype="void"))


def configure(shapes: Sequence[tuple[int, int]]) -> None:
    """Give this thread tiles of (rows, bytes of a row), zeros at first."""
    unused = [(0, 0)] * (TILES - len(shapes))
    rows, widths = zip(*shapes, *unused)
    words = struct.unpack("<16i", struct.pack("<16x8H16x8B8x", *widths, *rows))
    memory = scratch(16, "int32")
    for i, word in enumerate(words):
        put(memory, i, I.int32(word | (i == 0)))  # palette 1
    load_configuration(memory)


def load_configuration(memory: Buffer) -> None:
    """Give this thread the tiles that the 64 bytes of `memory` describe."""
    _evaluate("ldtilecfg", I.address_of(memory[0]))


def release() -> None:
    """Give the tiles back: the system need not save them, and the core may sleep."""
    _evaluate("tilerelease")


def zero(tile: int) -> None:
    """tile = 0"""
    _evaluate("tilezero", I.int8(tile))


def load(tile: int, element: Expr, stride: int) -> None:
    """Rows of a tile from the memory of a buffer's element on, `stride` bytes apart."""
    _evaluate("tileloadd64", I.int8(tile), I.address_of(element), I.int64(stride))


def store(tile: int, element: Expr, stride: int) -> None:
    """Rows of a tile to the memory of a buffer's element on, `stride` bytes apart."""
    _evaluate("tilestored64", I.int8(tile), I.address_of(element), I.int64(stride))


def multiply(kind: str, total: int, first: int, second: int) -> None:
    """total += first * second: int32 sums of bytes or float32 sums of bfloat16, as PRODUCTS names them."""
    _evaluate(PRODUCTS[kind], I.int8(total), I.int8(first), I.int8(second))
