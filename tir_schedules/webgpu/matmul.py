"""Matmuls with packed weights: dequantizing GEMV for one row, tiled GEMM for more, row lookup, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.op import Declined, Op
from tir_schedules.webgpu.kernel import (
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
    put,
    shared,
    to,
)

Knobs = Mapping[str, int | str]

# Elements of a plain weight that an invocation takes at once, as it takes the codes of one word.
_PLAIN_RUN = 4


@dataclass(frozen=True)
class Packed:
    """A weight [n, k] (or [experts, n, k]) in rows of words of `run` elements.

    `pairs`: float16 numbers are stored two in a uint32 (layout `row_pairs`).
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
    def stored(self) -> int:
        """Words of a row that are stored: a whole number of groups."""
        return -(-self.k // self.group) * self.group // self.run if self.bits else self.words

    def arguments(self) -> dict[str, Argument]:
        """The packed arrays."""
        lead = (self.experts,) if self.experts else ()
        if not self.bits:
            return {"weight": self._numbers(*lead, self.n, self.k)}
        return {
            "q_weight": Tensor((*lead, self.n, self.stored), "uint32"),
            "q_scale": self._numbers(*lead, self.n, -(-self.k // self.group)),
        }

    def _numbers(self, *shape: int) -> Tensor:
        return Tensor((*shape[:-1], -(-shape[-1] // 2)), "uint32") if self.pairs else Tensor(shape, self.dtype)

    def inside(self, word: Expr, j: int) -> Expr | None:
        """Whether element j of a word is a column; None where it always is."""
        return None if self.k % self.run == 0 else word * self.run + j < self.k


def packed(op: Op) -> Packed | Declined:
    """The weight of a tagged operation."""
    if op.str("layout") not in ("row", "row_pairs"):
        return Declined(f"layout {op.str('layout')}")
    pairs = op.str("layout") == "row_pairs" and op.str("dtype") == "float16"
    bits, experts = op.int("bits"), int(op.facts.get("experts", 0))
    run = op.int("codes_per_word") if bits else _PLAIN_RUN
    sizes = (op.int("n"), op.int("k"), run, bits, op.int("zero_point"), op.int("group_size"))
    return Packed(*sizes, op.str("dtype"), pairs, experts)


@dataclass(frozen=True)
class Rows:
    """Rows of a weight in a kernel: of one expert, where `lead` says which."""

    weight: Packed
    arrays: tuple[Buffer, ...]
    lead: tuple[Expr, ...] = ()

    def codes(self, row: Expr, word: Expr) -> list[Expr]:
        """The elements of a word as float32, without zero point and scale."""
        w = self.weight
        if not w.bits:
            last = [word * w.run + j if w.k % w.run == 0 else I.min(word * w.run + j, w.k - 1) for j in range(w.run)]
            return [self._number(0, row, at) for at in last]
        packed_codes = keep(self.arrays[0][(*self.lead, row, word)])
        mask = I.uint32((1 << w.bits) - 1)
        return [
            I.cast(I.bitwise_and(I.shift_right(packed_codes, I.uint32(w.bits * j)), mask), "float32")
            for j in range(w.run)
        ]

    def word(self, row: Expr, word: Expr) -> Expr:
        """A word of codes."""
        return self.arrays[0][(*self.lead, row, word)]

    def value(self, word: Expr, element: Expr, scale: Expr) -> Expr:
        """An element of a word of codes, where its number is not known to the compiler."""
        w = self.weight
        shift = I.cast(element * w.bits, "uint32")
        code = I.bitwise_and(I.shift_right(word, shift), I.uint32((1 << w.bits) - 1))
        return (I.cast(code, "float32") - I.float32(w.zero_point)) * scale

    def plain(self, row: Expr, column: Expr) -> Expr:
        """An element of a weight without codes."""
        inside = column if self.weight.k % self.weight.run == 0 else I.min(column, self.weight.k - 1)
        return self._number(0, row, inside)

    def _number(self, array: int, row: Expr, column: Expr) -> Expr:
        """A float of an array as float32. Scales are not negative."""
        if not self.weight.pairs:
            return f32(self.arrays[array][(*self.lead, row, column)])
        both = self.arrays[array][(*self.lead, row, column // 2)]
        half = I.bitwise_and(I.shift_right(both, I.cast(column % 2 * 16, "uint32")), I.uint32(0xFFFF))
        return half_to_float(keep(I.cast(half, "int32")), signed=not self.weight.bits)

    def scale(self, row: Expr, word: Expr) -> Expr:
        """The scale of a word's elements, float32."""
        return self._number(1, row, word * self.weight.run // self.weight.group)


def matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x dtype[m, k], packed w [n, k] -> x w^T dtype[m, n]: one row by GEMV, more by GEMM."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m = tirx.Var("m", "int64")
    arguments = {"x": Tensor((m, weight.k), dtype), **weight.arguments(), "y": Tensor((m, weight.n), dtype)}

    def body(x: Buffer, *rest: Buffer) -> None:
        rows, y = Rows(weight, rest[:-1]), rest[-1]
        with I.If(m <= int(knobs["gemv_max_rows"])):
            with I.Then():
                shape = gemv_shape(weight, knobs)
                with launch(shape.threads, ceildiv(weight.n, shape.rows), m) as (bx, i, tx):
                    _gemv(rows, shape, bx, tx, lambda at: x[i, at], lambda row, value: put(y, (i, row), value))
            with I.Else():
                _gemm(rows, m, x, y, knobs)

    return function("matmul", arguments, body)


@dataclass(frozen=True)
class GemvShape:
    """A workgroup of `threads`: `lanes` of them share rows, and each has `per_lane` rows at once."""

    threads: int
    lanes: int
    per_lane: int

    @property
    def rows(self) -> int:
        """Rows of a workgroup."""
        return self.threads // self.lanes * self.per_lane


def gemv_shape(weight: Packed, knobs: Knobs) -> GemvShape:
    """Lanes for which a row has words, the rest of the workgroup for other rows."""
    threads, lanes = int(knobs["gemv_threads"]), int(knobs["gemv_lanes"])
    while lanes > 4 and lanes > weight.words:
        lanes //= 2
    return GemvShape(threads, min(lanes, threads), int(knobs["gemv_rows"]))


def _gemv(
    rows: Rows,
    shape: GemvShape,
    block: Expr,
    tx: Expr,
    x: Callable[[Expr], Expr],
    store: Callable[[Expr, Expr], None],
) -> None:
    """store(row, w[row] . x) for the rows of one workgroup.

    The codes of a word are summed with their zero point, which the sum of x takes away again: one subtraction a word.
    """
    w, per_lane, lanes = rows.weight, shape.per_lane, shape.lanes
    lane = keep(tx % lanes)
    first = keep(block * shape.rows + tx // lanes * per_lane)
    sums, parts = local(per_lane), shared(per_lane * shape.threads)
    for r in range(per_lane):
        put(sums, r, I.float32(0))

    def word(at: Expr) -> None:
        xs = []
        for j in range(w.run):
            inside = w.inside(at, j)
            column = at * w.run + j
            value = f32(x(column)) if inside is None else I.if_then_else(
                inside, f32(x(I.min(column, w.k - 1))), I.float32(0)
            )  # fmt: skip
            xs.append(keep(value))
        total = keep(_sum(xs) * I.float32(w.zero_point)) if w.bits else None
        for r in range(per_lane):
            row = first + r if w.n % shape.rows == 0 else keep(I.min(first + r, w.n - 1))
            dot = _sum([a * b for a, b in zip(xs, rows.codes(row, at))])
            add(sums, r, dot if total is None else (dot - total) * rows.scale(row, at))

    with I.serial(0, w.words // lanes) as i:
        word(keep(i * lanes + lane))
    if w.words % lanes:
        with I.If(lane < w.words % lanes), I.Then():
            word(keep(w.words // lanes * lanes + lane))
    for r in range(per_lane):
        put(parts, r * shape.threads + tx, sums[r])
    barrier()
    _finish(shape, parts, block, tx, w.n, store)


def _finish(
    shape: GemvShape, parts: Buffer, block: Expr, tx: Expr, n: int, store: Callable[[Expr, Expr], None]
) -> None:
    """Sum what the lanes have of each row, in two steps, and store it."""
    lanes, threads = shape.lanes, shape.threads
    step = next(s for s in (8, 4, 2, 1) if lanes % s == 0 and shape.rows * (lanes // s) <= threads or s == 1)
    total = local(1)

    def at(row: Expr, lane: Expr) -> Expr:
        return row % shape.per_lane * threads + row // shape.per_lane * lanes + lane

    left = lanes
    if step > 1:
        left = lanes // step
        with I.If(tx < shape.rows * left), I.Then():
            row, part = keep(tx // left), keep(tx % left)
            put(total, 0, parts[at(row, part * step)])
            for i in range(1, step):
                add(total, 0, parts[at(row, part * step + i)])
        barrier()
        with I.If(tx < shape.rows * left), I.Then():
            put(parts, at(tx // left, tx % left), total[0])
        barrier()
    with I.If(I.And(tx < shape.rows, block * shape.rows + tx < n)), I.Then():
        put(total, 0, parts[at(tx, 0)])
        for i in range(1, left):
            add(total, 0, parts[at(tx, i)])
        store(block * shape.rows + tx, total[0])


def _sum(terms: list[Expr]) -> Expr:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _gemm(rows: Rows, m: Expr, x: Buffer, y: Buffer, knobs: Knobs) -> None:
    """y = x w^T: an invocation has `gemm_rows` rows of x and `gemm_columns` of y, and decodes each code once for them.

    All invocations of a workgroup read the same elements of x, which caches and uniform loads serve. There is no shared
    memory: software adapters clear it element by element in the code of the shader, and compile that for seconds.
    """
    w = rows.weight
    threads, height, width = (int(knobs[f"gemm_{name}"]) for name in ("threads", "rows", "columns"))
    with launch(threads, ceildiv(w.n, threads * width), ceildiv(m, height)) as (bx, by, tx):
        sums, codes = local(height * width), local(width, "uint32")
        last = keep(I.cast(m, "int32") - 1)
        lines = [keep(I.min(by * height + i, last)) for i in range(height)]
        columns = [keep(bx * (threads * width) + j * threads + tx) for j in range(width)]
        sources = columns if w.n % (threads * width) == 0 else [keep(I.min(column, w.n - 1)) for column in columns]
        with I.serial(0, height * width) as i:
            put(sums, i, 0.0)
        with I.serial(0, w.words) as word:
            for j in range(width):
                if w.bits:
                    put(codes, j, rows.word(sources[j], word))
            scales = [keep(rows.scale(source, word)) for source in sources] if w.bits else []
            with I.serial(0, w.run) as element:
                k = keep(word * w.run + element)
                inside = w.k % w.run == 0
                values = [
                    keep(rows.value(codes[j], element, scales[j]) if w.bits else rows.plain(sources[j], k))
                    for j in range(width)
                ]
                for i, line in enumerate(lines):
                    a = x[line, k] if inside else I.if_then_else(k < w.k, x[line, I.min(k, w.k - 1)], to(0.0, str(x.dtype)))
                    a = keep(f32(a))
                    for j, value in enumerate(values):
                        add(sums, i * width + j, a * value)
        with I.serial(0, height) as i:
            for j, column in enumerate(columns):
                inside = by * height + i <= last
                with I.If(inside if w.n % (threads * width) == 0 else I.And(inside, column < w.n)), I.Then():
                    put(y, (by * height + i, column), sums[i * width + j])


def take(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Packed table [n, k], ids i32[m] -> rows dtype[m, k]; an id outside the table reads the nearest row."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    m = tirx.Var("m", "int64")
    arguments = {**weight.arguments(), "ids": Tensor((m,), "int32"), "y": Tensor((m, weight.k), dtype)}
    threads = int(knobs["elementwise_threads"])

    def body(*buffers: Buffer) -> None:
        rows, ids, y = Rows(weight, buffers[:-2]), buffers[-2], buffers[-1]
        with launch(threads, ceildiv(weight.words, threads), m) as (bx, i, tx):
            word = keep(bx * threads + tx)
            with I.If(word < weight.words), I.Then():
                row = keep(I.min(I.max(ids[i], 0), weight.n - 1))
                scale = keep(rows.scale(row, word)) if weight.bits else None
                for j, code in enumerate(rows.codes(row, word)):
                    value = code if scale is None else (code - I.float32(weight.zero_point)) * scale
                    inside = weight.inside(word, j)
                    if inside is None:
                        put(y, (i, word * weight.run + j), value)
                        continue
                    with I.If(inside), I.Then():
                        put(y, (i, word * weight.run + j), value)

    return function("take", arguments, body)


def expert_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x [m, k] (`shared`) or [m * top, k], packed w [experts, n, k], ids i32[m, top] -> y dtype[m * top, n]."""
    weight = packed(op)
    if isinstance(weight, Declined):
        return weight
    top, shared_rows = op.int("top"), bool(op.int("shared"))
    m = tirx.Var("m", "int64")
    arguments = {
        "x": Tensor((m if shared_rows else m * top, weight.k), dtype),
        **weight.arguments(),
        "ids": Tensor((m, top), "int32"),
        "y": Tensor((m * top, weight.n), dtype),
    }
    shape = gemv_shape(weight, knobs)

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, ids, y = rest[:-2], rest[-2], rest[-1]
        with launch(shape.threads, ceildiv(weight.n, shape.rows), m * top) as (bx, i, tx):
            expert = keep(I.min(I.max(ids[i // top, i % top], 0), weight.experts - 1))
            source = i // top if shared_rows else i
            rows = Rows(weight, arrays, (expert,))
            _gemv(rows, shape, bx, tx, lambda at: x[source, at], lambda row, value: put(y, (i, row), value))

    return function("expert_matmul", arguments, body)
