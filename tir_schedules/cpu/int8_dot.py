"""Integer dot products of CPUs: int32 lanes += four products of a weight's byte and an activation's byte each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.packed_weight import Packed
from tir_schedules.cpu.vectors import Registers, prefetch, splat

KINDS = ("amx_int8", "avx512_vnni", "avx_vnni", "avx2", "neon_i8mm", "neon_dotprod")

_LOOK_UP = {4: "llvm.aarch64.neon.tbl1.v16i8", 8: "llvm.x86.avx2.pshuf.b", 16: "llvm.x86.avx512.pshuf.b.512"}


def _intrinsic(name: str, dtype: str, *args: tirx.PrimExpr) -> tirx.PrimExpr:
    return I.call_llvm_pure_intrin(I.llvm_lookup_intrinsic_id(name), *args, dtype=dtype)


@dataclass(frozen=True)
class Dot:
    """One instruction set's way: `kind` is one of KINDS, `lanes` the 32-bit lanes of its vectors."""

    kind: str
    lanes: int

    def zero_point(self, bits: int, zero_point: int) -> int:
        """The zero point of the bytes that `codes` gives, where `zero_point` is that of the stored codes."""
        if bits == 4:
            return zero_point
        return {"avx2": 0, "neon_dotprod": zero_point - 128, "neon_i8mm": zero_point - 128}.get(self.kind, zero_point)

    @property
    def byte_offset(self) -> int:
        """What must be added to a signed byte to make it one that `codes` would give: unsigned ones are 128 higher."""
        return 0 if self.kind == "amx_int8" or self.kind.startswith("neon") else 128

    def codes(self, word: tirx.PrimExpr, bits: int, part: tirx.PrimExpr, zero_point: int) -> tirx.PrimExpr:
        """The bytes [4 * lanes] of words uint32[lanes]: 4-bit codes have two parts, even and odd, 8-bit codes one.

        Bytes are unsigned for VNNI; NEON's sdot takes signed ones, AVX2's product of pairs magnitudes up to 127.
        """
        if bits == 4:
            shift = I.broadcast(I.cast(4 * part, "uint32"), self.lanes)
            word = I.bitwise_and(I.shift_right(word, shift), I.broadcast(I.uint32(0x0F0F0F0F), self.lanes))
        elif self.kind.startswith("neon"):
            word = I.bitwise_xor(word, I.broadcast(I.uint32(0x80808080), self.lanes))
        bytes_ = I.reinterpret(word, dtype=f"int8x{4 * self.lanes}")
        if bits == 8 and self.kind == "avx2":
            bytes_ = bytes_ - I.broadcast(I.int8(zero_point - 256 * (zero_point > 127)), 4 * self.lanes)
        return bytes_

    def levels(self, w: Packed) -> tuple[tuple[int, ...], int]:
        """The table of a weight as bytes that products take, and their zero point; 0: they have signs.

        AVX2 takes those with signs where sums of two products would leave int16.
        """
        if self.kind.startswith("neon") or (self.kind == "avx2" and 2 * 127 * w.highest >= 1 << 15):
            return w.table, 0
        return w.levels, w.zero_point

    def look_up(self, codes: tirx.PrimExpr, levels: tuple[int, ...]) -> tirx.PrimExpr:
        """levels[code] of the codes in the bytes of words uint32[lanes], as such words; at most 16 levels."""
        table = bytes(level & 255 for level in levels).ljust(16, b"\0")
        words = [I.uint32(int.from_bytes(table[i : i + 4], "little")) for i in range(0, 16, 4)]
        dtype = f"int8x{4 * self.lanes}"
        vector = I.reinterpret(tirx.Shuffle(words * (self.lanes // 4), list(range(self.lanes))), dtype=dtype)
        args = (vector, I.reinterpret(codes, dtype=dtype))
        return I.reinterpret(_intrinsic(_LOOK_UP[self.lanes], dtype, *args), dtype=f"uint32x{self.lanes}")

    def __call__(self, acc: tirx.PrimExpr, codes: tirx.PrimExpr, x: tirx.PrimExpr, bits: int) -> tirx.PrimExpr:
        """acc int32[lanes] + the dot products of each lane's four bytes of `codes` with the four signed bytes of x."""
        if self.kind == "avx2":
            return self.add_pairs(acc, self.products_of_pairs(codes, x, bits))
        lanes, x = f"int32x{self.lanes}", self._bytes(x)
        if self.kind.startswith("neon"):
            return _intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", lanes, acc, codes, x)
        return _intrinsic(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", lanes, acc, codes, x)

    def _bytes(self, x: tirx.PrimExpr) -> tirx.PrimExpr:
        """The four bytes of an int32 in each lane."""
        return I.reinterpret(I.broadcast(x, self.lanes), dtype=f"int8x{4 * self.lanes}")

    def pairs_that_fit(self, highest: int) -> int:
        """How many `products_of_pairs` of codes up to `highest` int16 can add up; 0: the instructions sum in int32."""
        return 32767 // (2 * 127 * highest) if self.kind == "avx2" else 0

    def products_of_pairs(self, codes: tirx.PrimExpr, x: tirx.PrimExpr, bits: int) -> tirx.PrimExpr:
        """AVX2's int16[2 * lanes]: sums of two products."""
        x, dtype = self._bytes(x), f"int8x{4 * self.lanes}"
        if bits == 8:  # |w| * sign(w) x: pairs stay within int16, 2 * 127 * 127
            x = _intrinsic("llvm.x86.avx2.psign.b", dtype, x, codes)
            codes = _intrinsic("llvm.x86.avx2.psign.b", dtype, codes, codes)
        return _intrinsic("llvm.x86.avx2.pmadd.ub.sw", f"int16x{2 * self.lanes}", codes, x)

    def add_pairs(self, acc: tirx.PrimExpr, pairs: tirx.PrimExpr) -> tirx.PrimExpr:
        """acc int32[lanes] + the two int16 of each lane."""
        ones = I.broadcast(I.int16(1), 2 * self.lanes)
        return acc + _intrinsic("llvm.x86.avx2.pmadd.wd", f"int32x{self.lanes}", pairs, ones)

    def pairs(self, acc: tirx.PrimExpr, first: tirx.PrimExpr, second: tirx.PrimExpr) -> tirx.PrimExpr:
        """acc int32[2 * 2] + two rows of eight signed bytes (int32[4]) times two others: only NEON's i8mm has it."""
        rows = (I.reinterpret(x, dtype="int8x16") for x in (first, second))
        return _intrinsic("llvm.aarch64.neon.smmla.v4i32.v16i8", "int32x4", acc, *rows)


class Sums:
    """`count` int32 sums of dot products in registers. AVX2 adds products of pairs in int16 first, as many as fit."""

    def __init__(self, dot: Dot, count: int, highest: int) -> None:
        """Codes are at most `highest`."""
        self._dot, self._count = dot, count
        self.room = dot.pairs_that_fit(highest)  # 0: for any number
        self.total = Registers(count, dot.lanes, "int32")
        self._pairs = Registers(count, 2 * dot.lanes, "int16") if self.room else None

    def add(self, i: Expr, codes: Expr, x: Expr, bits: int) -> None:
        """The i-th sum += a dot product, as `Dot` has it; within `adding`."""
        if self._pairs is None:
            self.total[i] = self._dot(self.total[i], codes, x, bits)
        else:
            self._pairs[i] = self._pairs[i] + self._dot.products_of_pairs(codes, x, bits)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """At most `room` products are added to each sum in its body."""
        if self._pairs is None:
            yield
            return
        with I.unroll(self._count) as i:
            self._pairs[i] = splat(I.int16(0), 2 * self._dot.lanes)
        yield
        with I.unroll(self._count) as i:
            self.total[i] = self._dot.add_pairs(self.total[i], self._pairs[i])


@dataclass(frozen=True)
class Weight:
    """A packed weight in a kernel, as `rows16` has it: words uint32[blocks, words, 16], scales [blocks, groups, 16].

    `subs` uint32[blocks, groups, 4] are sub-scales or zero points of 16 rows, a byte each.
    """

    packed: Packed
    dot: Dot
    words: Buffer
    scales: Buffer
    subs: Buffer | None = None

    def ask_scales(self, block: Expr, run: Expr) -> None:
        """Emit prefetches of the scales of 32 columns."""
        packed = self.packed
        at = run * packed.each if packed.span == 32 else run * 32 // packed.span * packed.each
        prefetch(self.scales, (block, at if packed.blocked else run, 0))
        if self.subs is not None:
            at = run * 32 // packed.group_size if packed.zeros else run * (32 // packed.part) * packed.each
            prefetch(self.subs, (block, at, 0))
