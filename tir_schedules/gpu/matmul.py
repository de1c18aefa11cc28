"""Matmuls with packed weights: dequantizing GEMV for one row, tiled GEMM for more, row lookup, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.gpu.kernel import (
    Argument,
    Buffer,
    Expr,
    Tensor,
    add,
    barrier,
    ceildiv,
    f32,
    function,
    half_to_float,
    keep,
    launch,
    local,
    pin,
    put,
    shared,
    workspace,
)
from tir_schedules.op import Declined, Op

Knobs = Mapping[str, int | str]

LANES = 32  # rows of the weight that stand side by side
# Columns for each input that only a head to the vocabulary has: it multiplies few rows, and needs no GEMM's shader.
HEAD = 12
# Elements of a plain weight that an invocation takes at once, as it takes the codes of one word.
_PLAIN_RUN = 4


@dataclass(frozen=True)
class Sizes:
    """What differs between weights that one kernel may serve: `columns` of the array of codes, or of the numbers of a
    plain weight, `groups` of the array of scales."""

    n: Expr
    k: Expr
    blocks: Expr
    columns: Expr
    groups: Expr


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] (or [experts, n, k]) in layout `rows32_pairs`, in words of `run` elements.

    `pairs`: its float16 numbers are stored two in a uint32.
    """

    n: int
    k: int
    run: int
    bits: int
    zero_point: int
    group: int
    dtype: str
    pairs: bool = False
    experts: int = 0

    @property
    def words(self) -> int:
        """Words of a row that hold elements."""
        return -(-self.k // self.run)

    @property
    def group_words(self) -> int:
        """Words that share a scale, where no group is cut off."""
        words = self.group // self.run if self.bits else 1
        return words if words * self.run == self.group and self.words % words == 0 else 1

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return -(-self.n // LANES)

    def sizes(self, *, arguments: bool = False) -> Sizes:
        """The sizes as numbers, or as arguments of the kernel where rows and columns fill blocks and groups."""
        filled = self.n % LANES == 0 and self.k % (self.group if self.bits else 2 * self.run) == 0
        if not arguments or not filled:
            return self._sizes(self.n, self.k, self.blocks)
        k, blocks = tirx.Var("k", "int32"), tirx.Var("blocks", "int32")
        return self._sizes(blocks * LANES, k, blocks)

    def _sizes(self, n: Expr, k: Expr, blocks: Expr) -> Sizes:
        if not self.bits:
            return Sizes(n, k, blocks, self._stored(k), 0)
        groups = ceildiv(k, self.group)
        return Sizes(n, k, blocks, groups * (self.group // self.run), self._stored(groups))

    def arguments(self, sizes: Sizes) -> dict[str, Argument]:
        """The packed arrays."""
        if not self.bits:
            return {"weight": self._array(sizes, sizes.columns, self._number)}
        codes, scales = self._array(sizes, sizes.columns, "uint32"), self._array(sizes, sizes.groups, self._number)
        return {"q_weight": codes, "q_scale": scales}

    def _array(self, sizes: Sizes, columns: Expr, dtype: str) -> Tensor:
        lead = (self.experts,) if self.experts else ()
        return Tensor((*lead, sizes.blocks, columns, LANES), dtype)

    @property
    def _number(self) -> str:
        return "uint32" if self.pairs else self.dtype

    def _stored(self, numbers: Expr) -> Expr:
        """Elements that hold a row of numbers."""
        return ceildiv(numbers, 2) if self.pairs else numbers


def packed(op: Op) -> Packed | Declined:
    """The weight of a tagged operation."""
    if op.str("layout") != "rows32_pairs":
        return Declined(f"layout {op.str('layout')}")
    bits, experts = op.int("bits"), int(op.facts.get("experts", 0))
    run = op.int("codes_per_word") if bits else _PLAIN_RUN
    sizes = (op.int("n"), op.int("k"), run, bits, op.int("zero_point"), op.int("group_size"))
    return Packed(*sizes, op.str("dtype"), op.str("dtype") == "float16", experts)


@dataclass(frozen=True)
class Rows:
    """Rows of a weight in a kernel: of one expert, where `lead` says which. A row is (block, lane)."""

    weight: Packed
    sizes: Sizes
    arrays: tuple[Buffer, ...]
    lead: tuple[Expr, ...] = ()

    def inside(self, column: Expr) -> Expr | None:
        """Whether a column exists; None where all of every word do."""
        return None if self.weight.k % self.weight.run == 0 else column < self.sizes.k

    def elements(self, block: Expr, lane: Expr, word: Expr) -> list[Expr]:
        """The elements of a word as float32, without zero point and scale."""
        w = self.weight
        if not w.bits:
            if w.k % w.run == 0:
                return self.values(block, lane, word, w.run)
            return [self.plain(block, lane, word * w.run + j) for j in range(w.run)]
        codes = keep(self.word(block, lane, word))
        return [self.code(codes, I.uint32(w.bits * j)) for j in range(w.run)]

    def word(self, block: Expr, lane: Expr, word: Expr) -> Expr:
        """A word of codes."""
        index = (*self.lead, block, word, lane)
        return self.arrays[0][index]

    def code(self, word: Expr, shift: Expr) -> Expr:
        """A code of a word as float32, through int32: software adapters convert uint32 in many steps."""
        code = I.bitwise_and(I.shift_right(word, shift), I.uint32((1 << self.weight.bits) - 1))
        return I.cast(I.cast(code, "int32"), "float32")

    def values(self, block: Expr, lane: Expr, word: Expr, count: int) -> list[Expr]:
        """The first `count` elements of a word as float32; all of them exist."""
        w = self.weight
        if w.bits:
            codes, scale = keep(self.word(block, lane, word)), pin(self.scale(block, lane, word))
            zero = I.float32(w.zero_point)
            return [keep((self.code(codes, I.uint32(w.bits * j)) - zero) * scale) for j in range(count)]
        if not w.pairs:
            return [keep(self.plain(block, lane, word * w.run + j)) for j in range(count)]
        pairs = [self._pair(0, block, lane, word * (w.run // 2) + j) for j in range(-(-count // 2))]
        return [pin(self._float(half)) for pair in pairs for half in pair][:count]

    def plain(self, block: Expr, lane: Expr, column: Expr) -> Expr:
        """An element of a weight without codes."""
        return self._number(
            0, block, lane, column if self.weight.k % self.weight.run == 0 else I.min(column, self.sizes.k - 1)
        )

    def scale(self, block: Expr, lane: Expr, word: Expr) -> Expr:
        """The scale of a word's elements, float32."""
        return self._number(1, block, lane, word * self.weight.run // self.weight.group)

    def _number(self, array: int, block: Expr, lane: Expr, column: Expr) -> Expr:
        """A float of an array as float32. Scales are not negative."""
        if not self.weight.pairs:
            index = (*self.lead, block, column, lane)
            return f32(self.arrays[array][index])
        low, high = self._pair(array, block, lane, column // 2)
        # No shift by a variable: software adapters do that number by number.
        return self._float(I.Select(column % 2 == 0, low, high))

    def _pair(self, array: int, block: Expr, lane: Expr, column: Expr) -> tuple[Expr, Expr]:
        """The bits of two floats that stand in one word, as uint32."""
        index = (*self.lead, block, column, lane)
        both = keep(self.arrays[array][index])
        return I.bitwise_and(both, I.uint32(0xFFFF)), I.shift_right(both, I.uint32(16))

    def _float(self, half: Expr) -> Expr:
        return half_to_float(pin(I.cast(half, "int32")), signed=not self.weight.bits)


def matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x dtype[m, k], packed w [n, k] -> x w^T dtype[m, n]: one row by GEMV, more by GEMM.

    For `gated_matmul` a second kernel multiplies the activation of the first half of the columns with the other half.
    """
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m = tirx.Var("m", "int32")
    gated = op.kind == "gated_matmul"
    sizes = weight.sizes(arguments=bool(knobs.get("sizes_as_arguments", 0)))
    width = sizes.n // 2 if gated else sizes.n
    arguments = {"x": Tensor((m, sizes.k), dtype), **weight.arguments(sizes), "y": Tensor((m, width), dtype)}
    shape = gemv_shape(weight, knobs)

    def gemv(rows: Rows, x: Buffer, y: Buffer) -> None:
        with launch(shape.threads, ceildiv(sizes.blocks, shape.blocks), m) as (bx, i, tx):
            _gemv(rows, shape, bx, tx, lambda at: x[i, at], lambda row, value: put(y, (i, row), value))

    def product(rows: Rows, x: Buffer, y: Buffer) -> None:
        if not gated and weight.n >= HEAD * weight.k:
            gemv(rows, x, y)
            return
        with I.If(m <= int(knobs["gemv_max_rows"])):
            with I.Then():
                gemv(rows, x, y)
            with I.Else():
                _gemm(rows, m, x, y, gemm_shape(weight, knobs))

    def body(x: Buffer, *rest: Buffer) -> None:
        rows, y = Rows(weight, sizes, rest[:-1]), rest[-1]
        if not gated:
            product(rows, x, y)
            return
        both, threads = workspace((m, sizes.n), dtype), int(knobs["elementwise_threads"])
        product(rows, x, both)
        activation = ACTIVATIONS[op.str("activation")]
        with launch(threads, ceildiv(width, threads), m) as (bx, i, tx):
            j = keep(bx * threads + tx)
            with I.If(j < width), I.Then():
                put(y, (i, j), activation(keep(f32(both[i, j]))) * f32(both[i, j + width]))

    return function("matmul", arguments, body)


@dataclass(frozen=True)
class GemvShape:
    """A workgroup: `blocks` of rows, and `splits` rows of 32 invocations that share their columns."""

    blocks: int
    splits: int

    @property
    def threads(self) -> int:
        return LANES * self.splits


def gemv_shape(weight: Packed, knobs: Knobs) -> GemvShape:
    """As many splits as it takes to keep a GPU busy, while each has enough words to be worth the sum at the end."""
    blocks = min(int(knobs["gemv_blocks"]), weight.blocks)
    wanted = int(knobs["gemv_invocations"]) * blocks // (weight.blocks * LANES)
    splits = 1
    while splits < min(8, wanted) and weight.words // (2 * splits) >= int(knobs["gemv_words"]):
        splits *= 2
    return GemvShape(blocks, splits)


def _gemv(
    rows: Rows,
    shape: GemvShape,
    bx: Expr,
    tx: Expr,
    x: Callable[[Expr], Expr],
    store: Callable[[Expr, Expr], None],
) -> None:
    """store(row, w[row] . x) for the rows of one workgroup.

    The codes of a group are summed with their zero point, which the sum of x takes away again, before the scale.
    """
    w, sizes, splits = rows.weight, rows.sizes, shape.splits
    lane, part = (tx, 0) if splits == 1 else (keep(tx % LANES), keep(tx // LANES))
    blocks = [bx * shape.blocks + r for r in range(shape.blocks)]
    if w.blocks % shape.blocks:
        blocks = [keep(I.min(block, sizes.blocks - 1)) for block in blocks]
    sums, dots, total = local(shape.blocks), local(shape.blocks), local(1)
    for r in range(shape.blocks):
        put(sums, r, I.float32(0))

    def word(at: Expr) -> None:
        xs = []
        for j in range(w.run):
            column = at * w.run + j
            inside = rows.inside(column)
            value = f32(x(column if inside is None else I.min(column, sizes.k - 1)))
            xs.append(keep(value if inside is None else I.Select(inside, value, I.float32(0))))
        if w.bits:
            put(total, 0, _sum([total[0], *xs]))
        for r, block in enumerate(blocks):
            put(dots, r, _sum([dots[r], *(b * a for a, b in zip(xs, rows.elements(block, lane, at)))]))

    def group(at: Expr) -> None:
        """The words that share a scale, or one."""
        put(total, 0, I.float32(0))
        for r in range(shape.blocks):
            put(dots, r, I.float32(0))
        if w.group_words == 1:
            word(at)
        else:
            with I.serial(0, w.group_words) as i:
                word(keep(at * w.group_words + i))
        for r, block in enumerate(blocks):
            if w.bits:
                scale = rows.scale(block, lane, at * w.group_words)
                add(sums, r, (dots[r] - total[0] * I.float32(w.zero_point)) * scale)
            else:
                add(sums, r, dots[r])

    groups = ceildiv(sizes.k, w.run) // w.group_words
    with I.serial(0, groups // splits) as i:
        group(keep(i * splits + part) if splits > 1 else i)
    if w.words // w.group_words % splits:
        with I.If(part < groups % splits), I.Then():
            group(keep(groups // splits * splits + part))
    if splits > 1:
        _sum_splits(shape, sums, tx)
    for r in range(shape.blocks):
        row = (bx * shape.blocks + r) * LANES + lane
        guards = [tx < LANES] if splits > 1 else []
        if w.n % (LANES * shape.blocks):
            guards.append(row < sizes.n)
        if not guards:
            store(row, sums[r])
            continue
        with I.If(guards[0] if len(guards) == 1 else I.And(*guards)), I.Then():
            store(row, sums[r])


def _sum_splits(shape: GemvShape, sums: Buffer, tx: Expr) -> None:
    """The first 32 invocations get the sums of all splits."""
    parts = shared(shape.blocks * shape.threads)
    for r in range(shape.blocks):
        put(parts, r * shape.threads + tx, sums[r])
    barrier()
    with I.If(tx < LANES), I.Then():
        for r in range(shape.blocks):
            for split in range(1, shape.splits):
                add(sums, r, parts[r * shape.threads + split * LANES + tx])


def _sum(terms: list[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True)
class GemmShape:
    """What an invocation has: rows of x, and columns of y, 32 apart."""

    rows: int
    columns: int


def gemm_blocks_knob(n: int, k: int, knobs: Knobs) -> str:
    """The knob that says how wide the tiles of a weight [n, k] are."""
    return "gemm_small_blocks" if n * k <= int(knobs.get("gemm_small", 0)) else "gemm_blocks"


def gemm_shape(weight: Packed, knobs: Knobs) -> GemmShape:
    """Tiles of one width; of `gemm_small_blocks` for weights of at most `gemm_small` numbers, if a target says so."""
    blocks = int(knobs[gemm_blocks_knob(weight.n, weight.k, knobs)])
    tiles = -(-weight.blocks // blocks)
    return GemmShape(int(knobs["gemm_rows"]), -(-weight.blocks // tiles))


def _gemm(rows: Rows, m: Expr, x: Buffer, y: Buffer, shape: GemmShape) -> None:
    """y = x w^T, in tiles.

    A word is decoded once for all rows, an element of x is loaded once for all columns. All invocations of a workgroup
    read the same elements of x, which caches and uniform loads serve: there is no shared memory, because software
    adapters run every invocation as a coroutine where there are barriers. For their sake also a word is unrolled: they
    load one number in about 100 instructions, and store every variable under a mask where a loop begins anew.
    """
    w, sizes, height, width = rows.weight, rows.sizes, shape.rows, shape.columns
    with launch(LANES, ceildiv(sizes.blocks, width), ceildiv(m, height)) as (bx, by, lane):
        sums, lines = local(height * width), local(height, "int32")
        last = keep(m - 1)
        # Where each row begins, in memory: TVM writes a binding out wherever it is used.
        flat = I.decl_buffer((m * sizes.k,), str(x.dtype), data=x.data)
        for i in range(height):
            put(lines, i, I.min(by * height + i, last) * sizes.k)
        blocks = [bx * width + j for j in range(width)]
        if w.blocks % width:
            blocks = [keep(I.min(block, sizes.blocks - 1)) for block in blocks]
        for i in range(height * width):
            put(sums, i, 0.0)

        def tile(word: Expr, count: int) -> None:
            """Adds the products of the first `count` elements of a word."""
            values = [rows.values(block, lane, word, count) for block in blocks]
            for i in range(height):
                xs = [keep(f32(flat[lines[i] + word * w.run + e])) for e in range(count)]
                for j in range(width):
                    # The value before x, and the sum first: what a simple register allocator keeps in registers.
                    put(sums, i * width + j, _sum([sums[i * width + j], *(v * a for v, a in zip(values[j], xs))]))

        with I.serial(0, sizes.k // w.run) as word:
            tile(word, w.run)
        if w.k % w.run:
            tile(sizes.k // w.run, w.k % w.run)
        with I.serial(0, height) as i, I.If(by * height + i <= last), I.Then():
            for j in range(width):
                column = (bx * width + j) * LANES + lane
                if w.n % (LANES * width) == 0:
                    put(y, (by * height + i, column), sums[i * width + j])
                    continue
                with I.If(column < sizes.n), I.Then():
                    put(y, (by * height + i, column), sums[i * width + j])


def take(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Packed table [n, k], ids i32[m] -> rows dtype[m, k]; an id outside the table reads the nearest row."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m, sizes = tirx.Var("m", "int64"), weight.sizes()
    arguments = {**weight.arguments(sizes), "ids": Tensor((m,), "int32"), "y": Tensor((m, weight.k), dtype)}
    threads = int(knobs["elementwise_threads"])

    def body(*buffers: Buffer) -> None:
        rows, ids, y = Rows(weight, sizes, buffers[:-2]), buffers[-2], buffers[-1]
        with launch(threads, ceildiv(weight.words, threads), m) as (bx, i, tx):
            word = keep(bx * threads + tx)
            with I.If(word < weight.words), I.Then():
                row = keep(I.min(I.max(ids[i], 0), weight.n - 1))
                block, lane = keep(row // LANES), keep(row % LANES)
                scale = pin(rows.scale(block, lane, word)) if weight.bits else None
                for j, element in enumerate(rows.elements(block, lane, word)):
                    value = element if scale is None else (element - I.float32(weight.zero_point)) * scale
                    column = word * weight.run + j
                    inside = rows.inside(column)
                    if inside is None:
                        put(y, (i, column), value)
                        continue
                    with I.If(inside), I.Then():
                        put(y, (i, column), value)

    return function("take", arguments, body)


def expert_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x [m, k] (`shared`) or [m * top, k], packed w [experts, n, k], ids i32[m, top] -> y dtype[m * top, n]."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    top, shared_rows = op.int("top"), bool(op.int("shared"))
    m, sizes = tirx.Var("m", "int64"), weight.sizes()
    arguments = {
        "x": Tensor((m if shared_rows else m * top, weight.k), dtype),
        **weight.arguments(sizes),
        "ids": Tensor((m, top), "int32"),
        "y": Tensor((m * top, weight.n), dtype),
    }
    shape = gemv_shape(weight, knobs)

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, ids, y = rest[:-2], rest[-2], rest[-1]
        with launch(shape.threads, ceildiv(weight.blocks, shape.blocks), m * top) as (bx, i, tx):
            expert = keep(I.min(I.max(ids[i // top, i % top], 0), weight.experts - 1))
            source = i // top if shared_rows else i
            rows = Rows(weight, sizes, arrays, (expert,))
            _gemv(rows, shape, bx, tx, lambda at: x[source, at], lambda row, value: put(y, (i, row), value))

    return function("expert_matmul", arguments, body)
