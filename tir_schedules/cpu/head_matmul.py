"""y[i, h] = x[i, h] w[h]^T for CPUs in float32: the matrix of each head, packed as `rows16`.

The sums of an element are in the order of k whatever rows are beside it. A tile's columns are unpacked once, for all
rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.block_weight import Blocks
from tir_schedules.cpu.packed_weight import LANES, Plain, Quantized, packed_of
from tir_schedules.cpu.vectors import Registers, read, scratch, splat, store
from tir_schedules.op import Op
from tir_schedules.rule import Declined, NamedRule, hand_written

FEW, MANY = (1, 4), (8, 2)  # rows and blocks of 16 columns of a tile: sums that do not wait for each other
DEPTH = 64  # of K that is unpacked at once, for L1


def head_matmul(op: Op) -> tirx.PrimFunc | Declined:
    """x f32[m, heads, columns], packed w [heads * n, k] -> y f32[m, heads, n]."""
    if op.str("layout") != "rows16":
        return Declined(f"weight layout {op.str('layout')} has no CPU kernel")
    w, heads, columns = packed_of(op), op.int("heads"), op.int("columns")
    n = w.n // heads
    if n % LANES:
        return Declined(f"{n} rows of a head")
    m = tirx.Var("m", "int64")
    arguments = {
        "x": Tensor((m, heads, columns), "float32", [(m * (heads * columns), "float32")]),
        **w.arrays(),
        "y": Tensor((m, heads, n), "float32", [(m * w.n, "float32")]),
    }

    def body(X: Buffer, *rest: Buffer) -> None:
        *arrays, Y = rest
        weight = Plain(w, *arrays) if w.bits == 0 else Blocks(w, *arrays) if w.blocked else Quantized(w, *arrays)
        with I.If(m < MANY[0]):
            with I.Then():
                _Tiles(weight, heads, columns, *FEW).multiply(X, Y, m)
            with I.Else():
                _Tiles(weight, heads, columns, *MANY).multiply(X, Y, m)

    return function("head_matmul", arguments, body)


@dataclass(frozen=True)
class _Tiles:
    """`rows` of x, which has `columns` for a head, by `blocks` of 16 rows of a head's weight, or fewer at its end."""

    weight: Plain | Quantized | Blocks
    heads: int
    columns: int
    rows: int
    blocks: int

    def multiply(self, X: Buffer, Y: Buffer, m: Expr) -> None:
        """Y = X W^T for all heads."""
        w = self.weight.w
        of_head = w.blocks // self.heads
        each = -(-of_head // self.blocks)
        depth = self.weight.depth(DEPTH)
        with I.parallel(self.heads * each) as task:
            head, tile = I.bind(task // each), I.bind(task % each)
            panel = scratch(depth * self.blocks * LANES)
            with I.serial(-(-w.k // depth)) as chunk:
                blocks = [head * of_head + I.min(tile * self.blocks + b, of_head - 1) for b in range(self.blocks)]
                for b, block in enumerate(blocks):

                    def unpack(k: Expr, numbers: Expr, b: int = b) -> None:
                        store(panel, (k * self.blocks + b) * LANES, numbers, LANES)

                    self.weight.columns(block, chunk, depth, unpack)
                with I.serial((m + self.rows - 1) // self.rows) as t:
                    rows = [I.bind(I.min(t * self.rows + r, m - 1)) for r in range(self.rows)]
                    out = [row * w.n + block * LANES for row in rows for block in blocks]
                    x = [(row * self.heads + head) * self.columns + chunk * depth for row in rows]
                    self._add(X, x, Y, out, panel, chunk, depth)

    def _add(
        self, X: Buffer, rows: list[Expr], Y: Buffer, out: list[Expr], panel: Buffer, chunk: Expr, depth: int
    ) -> None:
        """Y[out] (+)= the products of X[rows] with a panel: `depth` of K from chunk * depth on, as far as there is."""
        w, sums = self.weight.w, Registers(self.rows * self.blocks, LANES)
        for i, at in enumerate(out):
            with I.If(chunk == 0):
                with I.Then():
                    sums[i] = splat(0.0, LANES)
                with I.Else():
                    sums[i] = read(Y, at, LANES)
        with I.serial(I.min(depth, w.k - chunk * depth)) as k:
            numbers = [I.bind(read(panel, (k * self.blocks + b) * LANES, LANES)) for b in range(self.blocks)]
            for r, row in enumerate(rows):
                x = I.bind(splat(X[row + k], LANES))
                for b, number in enumerate(numbers):
                    sums[r * self.blocks + b] = sums[r * self.blocks + b] + x * number
        for i, at in enumerate(out):
            store(Y, at, sums[i], LANES)


RULES = (NamedRule("cpu.head_matmul", ("head_matmul",), hand_written(lambda _, op, knobs: head_matmul(op))),)
