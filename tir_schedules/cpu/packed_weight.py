"""Weights packed as `rows16`, as kernels with float32 sums read them: 16 rows of W are the 16 lanes of a vector.

Layout: `mlcpipe/quantization/layout.py`. Codes: element j of a word at bits j*bits of a uint32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, put
from tir_schedules.cpu.store import store_row
from tir_schedules.cpu.vectors import Registers, lanes_of, load, read, scratch, splat
from tir_schedules.op import Op

LANES = 16


@dataclass(frozen=True)
class Packed:
    """Facts of a packed weight [N, K]; bits 0 means plain floats of `dtype`.

    `kept` ones are those of a checkpoint: all codes and signs of scales occur. `blocked` ones have bit planes, or other
    numbers than scales of 32 or of a row. See `quantization/native_formats.py`.
    """

    n: int
    k: int
    bits: int
    group_size: int
    codes_per_word: int
    zero_point: int
    dtype: str
    kept: bool = False
    super_size: int = 0
    minima: bool = False
    table: tuple[int, ...] = ()
    unit: float = 1.0
    scale_format: str = ""
    zeros: bool = False
    blocked: bool = False

    @property
    def groups(self) -> int:
        return -(-self.k // self.group_size)

    @property
    def words_per_group(self) -> int:
        return self.group_size // self.codes_per_word

    @property
    def blocks(self) -> int:
        return -(-self.n // LANES)

    @property
    def words(self) -> int:
        """Words of a row."""
        return self.k * self.bits // 32 if self.blocked else self.groups * self.words_per_group

    @property
    def part(self) -> int:
        """Columns of a block format that are multiplied before a scale: a group, or 32 of a larger one."""
        return min(self.group_size, 32)

    @property
    def levels(self) -> tuple[int, ...]:
        """The table as codes of up to 8 bits with `zero_point`."""
        return tuple(level + self.zero_point for level in self.table)

    @property
    def highest(self) -> int:
        """The highest code, of `levels` where there is a table."""
        return max(self.levels, default=(1 << self.bits) - 1)

    @property
    def shifted(self) -> bool:
        """Whether groups have a minimum or a zero point of their own, which the sum of x is multiplied with."""
        return self.minima or self.zeros

    @property
    def each(self) -> int:
        """Scales and minima beside each other for a group: its scale, and its minimum if it has one."""
        return 2 if self.minima else 1

    @property
    def span(self) -> int:
        """Columns that share a number of the array of scales."""
        return self.super_size or self.group_size

    def arrays(self) -> dict[str, Tensor]:
        """The stored arrays by parameter name."""
        if self.bits == 0:
            return {"w": Tensor((self.blocks, self.k, LANES), self.dtype)}
        scales = self.each * (self.k // self.span) if self.blocked else self.groups
        arrays = {
            "w": Tensor((self.blocks, self.words, LANES), "uint32"),
            "s": self._scales(scales),
        }
        if self.super_size:
            arrays["q"] = byte_tensor(self.blocks, self.each * self.groups)
        if self.zeros:
            arrays["z"] = byte_tensor(self.blocks, self.groups)
        return arrays

    def _scales(self, columns: int) -> Tensor:
        if self.scale_format == "bf16":  # two rows a word
            return Tensor((self.blocks, columns, LANES // 2), "uint32")
        return (
            byte_tensor(self.blocks, columns)
            if self.scale_format
            else Tensor((self.blocks, columns, LANES), self.dtype)
        )


def packed_of(op: Op) -> Packed:
    """The weight facts of a tagged matmul."""
    return Packed(
        n=op.int("n"),
        k=op.int("k"),
        bits=op.int("bits"),
        group_size=op.int("group_size"),
        codes_per_word=op.int("codes_per_word"),
        zero_point=op.int("zero_point"),
        dtype=op.str("dtype"),
        kept="scheme" in op.facts,
        super_size=int(op.facts.get("super_size", 0)),
        minima=bool(op.facts.get("minima", 0)),
        table=tuple(map(int, str(op.facts.get("table", "")).split())),
        unit=float(op.facts.get("unit", 1.0)),
        scale_format=str(op.facts.get("scale_format", "")),
        zeros=bool(op.facts.get("zeros", 0)),
        blocked=bool(op.facts.get("blocked", 0)),
    )


def byte_tensor(blocks: int, columns: int) -> Tensor:
    """A byte of each of 16 rows side by side, for each column."""
    return Tensor((blocks, columns, LANES // 4), "uint32")


def codes(word: Expr, i: Expr, bits: int) -> Expr:
    """The i-th codes of 16 words, as float32."""
    shifted = I.shift_right(word, splat(I.cast(i * bits, "uint32"), LANES))
    code = I.bitwise_and(shifted, splat(I.uint32((1 << bits) - 1), LANES))
    return I.cast(I.cast(code, lanes_of("int32", LANES)), lanes_of("float32", LANES))


def sum_of(parts: Registers, first: int, count: int) -> Expr:
    """The sum of `count` (a power of two) parts, in pairs."""
    if count == 1:
        return parts[first]
    return sum_of(parts, first, count // 2) + sum_of(parts, first + count // 2, count // 2)


@dataclass(frozen=True)
class Plain:
    """A weight of floats, W [blocks, K, 16]."""

    w: Packed
    W: Buffer

    def gemv(self, X: Buffer, Y: Buffer) -> None:
        """Y[0] = W X[0]."""

        def add(part: Registers, i: Expr, block: Expr, k: Expr) -> None:
            part[i] = part[i] + load(self.W, (block, k, 0), LANES) * splat(X[0, k], LANES)

        with I.parallel(self.w.blocks) as block:
            total, part = Registers(1, LANES), Registers(8, LANES)
            with I.unroll(8) as i:
                part[i] = splat(0.0, LANES)
            with I.serial(self.w.k // 8) as k, I.unroll(8) as i:
                add(part, i, block, k * 8 + i)
            with I.serial(self.w.k % 8) as k:
                add(part, 0, block, self.w.k // 8 * 8 + k)
            total[0] = sum_of(part, 0, 8)
            store_row(Y, 0, block, total)

    def depth(self, most: int) -> int:
        """How much of K is held in scratch."""
        return most

    @property
    def ragged(self) -> bool:
        """Whether `columns` goes past K."""
        return False

    def columns(self, block: Expr, chunk: Expr, depth: int, use: Callable[[Expr, Expr], None]) -> None:
        """Emit use(k, 16 columns at depth * chunk + k) for `depth` of K, as far as there is."""
        with I.serial(I.min(depth, self.w.k - chunk * depth)) as k:
            use(k, load(self.W, (block, chunk * depth + k, 0), LANES))


@dataclass(frozen=True)
class Quantized:
    """A weight of codes, W uint32[blocks, words, 16], and their scales, S [blocks, groups, 16]."""

    w: Packed
    W: Buffer
    S: Buffer

    @property
    def group(self) -> int:
        """Codes between two reads of scales: a row's only scale is read again for every 32, which bounds unrolling."""
        return 32 if self.w.groups == 1 and self.w.group_size % 32 == 0 else self.w.group_size

    @property
    def groups(self) -> int:
        return self.w.groups * self.w.group_size // self.group

    @property
    def words(self) -> int:
        """Words of a group."""
        return self.group // self.w.codes_per_word

    def scale(self, block: Expr, g: Expr) -> Expr:
        """The scales of a group of 16 rows."""
        return load(self.S, (block, I.min(g, self.w.groups - 1), 0), LANES)

    def gemv(self, X: Buffer, Y: Buffer) -> None:
        """Y[0] = W X[0]. Zero points are subtracted once a group: -zero_point * sum(x) is where its sums start."""
        x, bias = self.padded_row(X, 0)
        with I.parallel(self.w.blocks) as block:
            total, part, word = Registers(1, LANES), Registers(4, LANES), Registers(1, LANES, "uint32")
            total[0] = splat(0.0, LANES)
            with I.serial(self.groups) as g:
                part[0] = splat(bias[g], LANES)
                with I.unroll(3) as i:
                    part[i + 1] = splat(0.0, LANES)
                with I.unroll(self.words) as j:
                    word[0] = read(self.W, (block, g * self.words + j, 0), LANES)
                    with I.unroll(self.w.codes_per_word) as i:
                        k = g * self.group + j * self.w.codes_per_word + i
                        part[i % 4] = part[i % 4] + codes(word[0], i, self.w.bits) * splat(x[k], LANES)
                total[0] = total[0] + sum_of(part, 0, 4) * self.scale(block, g)
            store_row(Y, 0, block, total)

    def padded_row(self, X: Buffer, row: Expr) -> tuple[Buffer, Buffer]:
        """X[row] with zeros to the end of the last group, and -zero_point * its sum for each group."""
        padded = self.groups * self.group
        x, bias = scratch(padded), scratch(self.groups)
        eight, four = Registers(1, 8), Registers(1, 4)
        with I.vectorized(self.w.k) as i:
            put(x, i, X[row, i])
        with I.serial(padded - self.w.k) as i:
            put(x, self.w.k + i, I.float32(0))
        with I.serial(self.groups) as g:
            eight[0] = read(x, g * self.group, 8)
            with I.unroll(self.group // 8 - 1) as i:
                eight[0] = eight[0] + read(x, g * self.group + i * 8 + 8, 8)
            four[0] = I.vectorlow("float32x4", eight[0]) + I.vectorhigh("float32x4", eight[0])
            a, b, c, d = (four.memory[0, i] for i in range(4))
            put(bias, g, (a + b + c + d) * I.float32(-float(self.w.zero_point)))
        return x, bias

    def depth(self, most: int) -> int:
        """How much of K is held in scratch: whole groups."""
        return max(1, most // self.group) * self.group

    @property
    def ragged(self) -> bool:
        """Whether `columns` goes past K, to the end of a group."""
        return self.groups * self.group != self.w.k

    def columns(self, block: Expr, chunk: Expr, depth: int, use: Callable[[Expr, Expr], None]) -> None:
        """Emit use(k, 16 columns at depth * chunk + k) for `depth` of K, as far as there are groups."""
        scale, word = Registers(1, LANES), Registers(1, LANES, "uint32")
        chunk_groups, per_word = depth // self.group, self.w.codes_per_word
        first = chunk * chunk_groups
        with I.serial(I.min(chunk_groups, self.groups - first)) as g:
            scale[0] = self.scale(block, first + g)
            with I.unroll(self.words) as j:
                word[0] = read(self.W, (block, (first + g) * self.words + j, 0), LANES)
                with I.unroll(per_word) as i:
                    code = codes(word[0], i, self.w.bits) - splat(float(self.w.zero_point), LANES)
                    use(g * self.group + j * per_word + i, code * scale[0])
