"""A packed weight in layout `rows32_pairs`, or rows that hosts gathered, and how one invocation reads a row."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Argument, Buffer, Expr, Tensor, f32
from tir_schedules.gpu.kernel import ceildiv, half_to_float, keep, pin
from tir_schedules.gpu.matmul.planes import RUN_STEPS, STEP, Kept, Scale, kept_of
from tir_schedules.op import Op
from tir_schedules.rule import Declined

BLOCK_ROWS = 32  # rows of a weight that are stored next to each other, and lanes that read them
_PLAIN_RUN = 4  # elements of a plain weight that an invocation takes at once, like the codes of one word
_MIN_LM_HEAD_RATIO = 12


def is_lm_head(n: int, k: int) -> bool:
    """Whether a weight [n, k] can only be the head: it multiplies few rows of x, and needs no shader for GEMM."""
    return n >= _MIN_LM_HEAD_RATIO * k


@dataclass(frozen=True)
class Sizes:
    """Sizes by which weights of one kernel may differ.

    `columns` is that of the array of codes, or of the numbers of a plain weight; `groups` that of the array of scales;
    `subs` that of the array of sub-scales.
    """

    n: Expr
    k: Expr
    blocks: Expr
    columns: Expr
    groups: Expr
    subs: Expr = 0

    def of_array(self, array: int) -> Expr:
        """Columns of the first, second or third array."""
        return (self.columns, self.groups, self.subs)[array]


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] or [experts, n, k] in layout `rows32_pairs`, in words of `run` elements.

    `group` is the columns of a quantization group. `pairs`: float16 numbers are stored two in a uint32. `kept`: a form
    of a checkpoint, whose "words" are steps of 8 columns. `by_row`: in layout `row_words`, where a row is a block.
    """

    n: int
    k: int
    run: int
    bits: int
    zero_point: float
    group: int
    dtype: str
    pairs: bool = False
    experts: int = 0
    kept: Kept | None = None
    by_row: bool = False

    @property
    def words(self) -> int:
        """Words of a row that hold elements."""
        return -(-self.k // self.run)

    @property
    def group_words(self) -> int:
        """Words that share a scale, or 1 where a group is cut off."""
        words = self.group // self.run if self.bits else 1
        return words if words * self.run == self.group and self.words % words == 0 else 1

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return -(-self.n // BLOCK_ROWS)

    def sizes(self, *, arguments: bool = False) -> Sizes:
        """The sizes as numbers, or as arguments of the kernel if rows and columns fill blocks and groups."""
        divisible = self.n % BLOCK_ROWS == 0 and self.k % (self.group if self.bits else 2 * self.run) == 0
        if not arguments or not divisible:
            return self._sizes(self.n, self.k, self.blocks)
        k, blocks = tirx.Var("k", "int32"), tirx.Var("blocks", "int32")
        return self._sizes(blocks * BLOCK_ROWS, k, blocks)

    def _sizes(self, n: Expr, k: Expr, blocks: Expr) -> Sizes:
        if not self.bits:
            return Sizes(n, k, blocks, self._stored(k), 0)
        if self.kept is not None:
            scales, subs = k // self.kept.span * self.kept.each, k // self.kept.group * self.kept.each
            stored = scales if self.kept.scale_format else self._stored(scales)
            return Sizes(n, k, blocks, k // 32 * self.bits, stored, subs if self.kept.has_subs else 0)
        groups = ceildiv(k, self.group)
        return Sizes(n, k, blocks, groups * (self.group // self.run), self._stored(groups))

    def arguments(self, sizes: Sizes) -> dict[str, Argument]:
        """The packed arrays as arguments of a kernel."""
        if not self.bits:
            return {"weight": self._array(sizes, sizes.columns, self._float_dtype)}
        names = ("q_weight", "q_scale", *(["q_sub"] if self.kept is not None and self.kept.has_subs else []))
        wide = self.kept is not None and self.kept.scale_format == "f32"
        dtypes = ("uint32", "float32" if wide else self._float_dtype, "uint32")
        return {name: self._array(sizes, sizes.of_array(i), dtypes[i], self.lanes(i)) for i, name in enumerate(names)}

    def of_rows(self, m: Expr) -> Sizes:
        """The sizes of m gathered rows."""
        return self._sizes(m, self.k, m)

    def _array(self, sizes: Sizes, columns: Expr, dtype: str, lanes: int = BLOCK_ROWS) -> Tensor:
        if self.by_row:
            return Tensor((sizes.blocks, ceildiv(columns, BLOCK_ROWS // lanes)), dtype)
        lead = (self.experts,) if self.experts else ()
        return Tensor((*lead, sizes.blocks, columns, lanes), dtype)

    def lanes(self, array: int) -> int:
        """Numbers of the first, second or third array for a column of a block.

        Words hold a byte of four rows, or a bfloat16 of two.
        """
        if array == 2 or (array == 1 and self.kept is not None and self.kept.byte_scales):
            return BLOCK_ROWS // 4
        return BLOCK_ROWS // 2 if array == 1 and self._upper_halves else BLOCK_ROWS

    @property
    def _upper_halves(self) -> bool:
        return self.kept is not None and self.kept.scale_format == "bf16"

    @property
    def _float_dtype(self) -> str:
        return "uint32" if self.pairs else self.dtype

    def _stored(self, numbers: Expr) -> Expr:
        """Stored elements of a row of numbers."""
        return ceildiv(numbers, 2) if self.pairs else numbers


def packed(op: Op) -> Packed | Declined:
    """The weight of a tagged operation."""
    by_row = op.kind == "rows"
    if op.str("layout") != ("row_words" if by_row else "rows32_pairs"):
        return Declined(f"layout {op.str('layout')}")
    bits, experts, kept = op.int("bits"), int(op.facts.get("experts", 0)), kept_of(op)
    if kept is not None:
        sizes = (op.int("n"), op.int("k"), STEP, bits, kept.zero, kept.part)
        return Packed(*sizes, op.str("dtype"), pairs=True, experts=experts, kept=kept, by_row=by_row)
    run = op.int("codes_per_word") if bits else _PLAIN_RUN
    sizes = (op.int("n"), op.int("k"), run, bits, op.int("zero_point"), op.int("group_size"))
    return Packed(*sizes, op.str("dtype"), op.str("dtype") == "float16", experts, by_row=by_row)


@dataclass(frozen=True)
class Rows:
    """Rows of a weight in a kernel, of the expert in `lead` if there is one. A row is (block, lane)."""

    weight: Packed
    sizes: Sizes
    arrays: tuple[Buffer, ...]
    lead: tuple[Expr, ...] = ()

    def inside(self, column: Expr) -> Expr | None:
        """Whether a column exists; None if every column of every word does."""
        return None if self.weight.k % self.weight.run == 0 else column < self.sizes.k

    def elements(self, block: Expr, lane: Expr, word: Expr) -> list[Expr]:
        """The elements of a word as float32, without zero point and scale."""
        w = self.weight
        if not w.bits:
            if w.k % w.run == 0:
                return self.values(block, lane, word, w.run)
            return [self.plain(block, lane, word * w.run + j) for j in range(w.run)]
        if w.kept is not None:
            return self._kept_codes(w.kept, block, lane, word)
        codes = keep(self.word(block, lane, word))
        return [self.code(codes, I.uint32(w.bits * j)) for j in range(w.run)]

    def _kept_codes(self, kept: Kept, block: Expr, lane: Expr, step: Expr) -> list[Expr]:
        run, own = keep(step // RUN_STEPS), keep(step % RUN_STEPS)
        places = [run * kept.bits + i for words in kept.words(own).values() for i in words]
        stored = [keep(self.word(block, lane, place)) for place in places]
        words = kept.joined(stored, own)
        numbers = [kept.number(words[i], bit) for i, bit in map(kept.place, range(STEP))]
        return [number - I.float32(1 << kept.width) for number in numbers]

    def word(self, block: Expr, lane: Expr, word: Expr) -> Expr:
        """A word of codes."""
        return self._stored(0, block, word, lane)

    def _stored(self, array: int, block: Expr, column: Expr, lane: Expr, parts: int = 1) -> Expr:
        """What an array has for a column of a row: a word has those of `parts` rows, or columns of a gathered row."""
        of_rows = (column // parts,) if self.weight.by_row else (column, lane // parts)
        index = (*self.lead, block, *of_rows)
        return self.arrays[array][index]

    def _part(self, column: Expr, lane: Expr, parts: int) -> Expr:
        """Which of the parts of a word, as `_stored` has it."""
        return (column if self.weight.by_row else lane) % parts

    def code(self, word: Expr, shift: Expr) -> Expr:
        """A code of a word as float32, through int32: software adapters convert uint32 in many steps."""
        code = I.bitwise_and(I.shift_right(word, shift), I.uint32((1 << self.weight.bits) - 1))
        return I.cast(I.cast(code, "int32"), "float32")

    def values(self, block: Expr, lane: Expr, word: Expr, count: int) -> list[Expr]:
        """The first `count` elements of a word, which exist, as float32."""
        w = self.weight
        if w.bits:
            codes, scale = self.elements(block, lane, word)[:count], self.scale(block, lane, word).pinned()
            return [keep(scale.value(code, w.zero_point)) for code in codes]
        if not w.pairs:
            return [keep(self.plain(block, lane, word * w.run + j)) for j in range(count)]
        pairs = [self._pair(0, block, lane, word * (w.run // 2) + j) for j in range(-(-count // 2))]
        return [pin(self._float(half)) for pair in pairs for half in pair][:count]

    def plain(self, block: Expr, lane: Expr, column: Expr) -> Expr:
        """An element of a weight without codes."""
        return self._number(
            0, block, lane, column if self.weight.k % self.weight.run == 0 else I.min(column, self.sizes.k - 1)
        )

    def scale(self, block: Expr, lane: Expr, word: Expr) -> Scale:
        """The scale of a word's elements."""
        kept = self.weight.kept
        if kept is None:
            return Scale(self._number(1, block, lane, word * self.weight.run // self.weight.group))
        span = word * STEP // kept.span
        stored = self._kept_scale(kept, block, lane, span)
        if kept.zeros:
            return stored.less(I.bitwise_and(self._byte(2, block, lane, span), 255))
        if not kept.super_size:
            return stored
        first = word * STEP // kept.group * kept.each
        return stored.times([f32(self._byte(2, block, lane, first + i)) for i in range(kept.each)])

    def _kept_scale(self, kept: Kept, block: Expr, lane: Expr, span: Expr) -> Scale:
        """The numbers of the array of scales for a span of columns."""
        if kept.byte_scales:
            return Scale(kept.stored_scale(pin(I.bitwise_and(self._byte(1, block, lane, span), 255))))
        if kept.scale_format:
            return Scale(*(self._wide_scale(kept, block, lane, span * kept.each + i) for i in range(kept.each)))
        if kept.minima:
            factor, minimum = (kept.half_scale(pin(I.cast(h, "int32"))) for h in self._pair(1, block, lane, span))
            return Scale(factor, minimum)
        low, high = self._pair(1, block, lane, span // 2)
        return Scale(kept.half_scale(pin(I.cast(I.Select(span % 2 == 0, low, high), "int32"))))

    def _wide_scale(self, kept: Kept, block: Expr, lane: Expr, column: Expr) -> Expr:
        """A scale or minimum in float32 or bfloat16."""
        parts = 1 if kept.scale_format == "f32" else 2
        stored = keep(self._stored(1, block, column, lane, parts))
        if parts == 1:
            return kept.in_units(stored)
        low, high = kept.upper_halves(stored)
        return pin(I.Select(self._part(column, lane, 2) == 0, low, high))

    def _byte(self, array: int, block: Expr, lane: Expr, column: Expr) -> Expr:
        """A byte of an array, with its sign, as int32."""
        shift = 24 - self._part(column, lane, 4) * 8
        word = I.shift_left(self._stored(array, block, column, lane, 4), I.cast(shift, "uint32"))
        return I.shift_right(I.reinterpret("int32", word), 24)

    def _number(self, array: int, block: Expr, lane: Expr, column: Expr) -> Expr:
        """A number of an array as float32."""
        if not self.weight.pairs:
            return f32(self._stored(array, block, column, lane))
        low, high = self._pair(array, block, lane, column // 2)
        # No shift by a variable: software adapters run that lane by lane.
        return self._float(I.Select(column % 2 == 0, low, high))

    def _pair(self, array: int, block: Expr, lane: Expr, column: Expr) -> tuple[Expr, Expr]:
        """The bits of the two float16 of a word, uint32 each."""
        word = keep(self._stored(array, block, column, lane))
        return I.bitwise_and(word, I.uint32(0xFFFF)), I.shift_right(word, I.uint32(16))

    def _float(self, half: Expr) -> Expr:
        """A float16 of a weight, or of a scale, which may be negative."""
        return half_to_float(pin(I.cast(half, "int32")), signed=True)


def sum_in_order(terms: list[Expr]) -> Expr:
    """The sum of terms, added from the first to the last."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
