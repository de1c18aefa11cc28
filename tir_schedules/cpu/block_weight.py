"""Block formats as kernels with float32 sums read them: each code becomes a number in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.packed_weight import LANES, Packed
from tir_schedules.cpu.planes import BYTES, ONE, chosen, fields, scale_of, zero_of
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, lanes_of, read, splat

RUN, ROWS, PARTS = 32, 4, 4  # columns whose words lie together; rows of x at once; sums of a row


@dataclass(frozen=True)
class Blocks:
    """A weight in bit planes, W uint32[blocks, words, 16], scales S and bytes Q: sub-scales or zero points."""

    w: Packed
    W: Buffer
    S: Buffer
    Q: Buffer | None = None

    def gemv(self, X: Buffer, Y: Buffer) -> None:
        """Y[0] = W X[0]."""
        with I.parallel(self.w.blocks) as block:
            self._tile(X, Y, block, 0, I.int64(1), 1)

    def few_rows(self, X: Buffer, Y: Buffer, m: Expr) -> None:
        """Y = X W^T: each row has the sums of `gemv`, whichever rows are beside it."""
        with I.parallel(self.w.blocks) as block, I.serial((m + ROWS - 1) // ROWS) as panel:
            self._tile(X, Y, block, panel * ROWS, m, ROWS)

    def _tile(self, X: Buffer, Y: Buffer, block: Expr, row: Expr, m: Expr, rows: int) -> None:
        Output(Y, row, m, block, rows, 1).store(self.sums(X, block, row, m, rows))

    def sums(self, X: Buffer, block: Expr, row: Expr, m: Expr, rows: int) -> Registers:
        """16 columns of `rows` rows of y, from `row` on; rows from m on repeat the last."""
        part, total = Registers(rows * PARTS, LANES), Registers(rows, LANES)
        with I.unroll(rows * PARTS) as i:
            part[i] = splat(0.0, LANES)

        with I.serial(self.w.k // RUN) as run:

            def add(e: int, values: Expr, run: Expr = run) -> None:
                with I.unroll(rows) as r:
                    i, x = r * PARTS + e % PARTS, X[I.min(row + r, m - 1), run * RUN + e]
                    part[i] = part[i] + values * splat(x, LANES)

            self._values(block, run, add)
        with I.unroll(rows) as r:
            at = r * PARTS
            total[r] = (part[at] + part[at + 1]) + (part[at + 2] + part[at + 3])
        return total

    def _values(self, block: Expr, run: Expr, use: Callable[[int, Expr], None]) -> None:
        """Emit use(e, 16 columns) for each of 32 elements of K."""
        w, parts = self.w, RUN // self.w.part
        word, scale = Registers(w.bits, LANES, "uint32"), Registers(2, LANES)
        element, looked_up = Registers(1, LANES), Registers(2, LANES, "uint32")
        with I.unroll(w.bits) as i:
            word[i] = read(self.W, (block, run * w.bits + i, 0), LANES)
        zero = splat(float(w.zero_point), LANES)
        for e in range(RUN):
            if e % w.part == 0:
                at = (block, run * parts + e // w.part, 0)
                for which in range(w.each):
                    scale[which] = scale_of(w, self.S, self.Q, at, which, LANES)
                if w.zeros:
                    scale[1] = zero_of(w, self.Q, at, LANES)
            t, low = e // 8 * 2 + e % 2, e // 2 % 4 * 8
            if w.table:
                if low == 0:
                    looked_up[e % 2] = chosen(fields(lambda i: word[i], w.bits, t, 0, BYTES, LANES), w.levels, LANES)
                code = I.shift_right(looked_up[e % 2], splat(I.uint32(low), LANES))
                code = I.bitwise_and(code, splat(I.uint32(255), LANES))
            else:
                code = fields(lambda i: word[i], w.bits, t, low, ONE, LANES)
            level = I.cast(I.cast(code, lanes_of("int32", LANES)), lanes_of("float32", LANES))
            level = level - (scale[1] if w.zeros else zero)
            element[0] = level * scale[0] + scale[1] if w.minima else level * scale[0]
            use(e, element[0])

    def depth(self, most: int) -> int:
        """How much of K is held in scratch: whole runs."""
        return max(1, most // RUN) * RUN

    @property
    def ragged(self) -> bool:
        """Whether `columns` goes past K."""
        return False

    def columns(self, block: Expr, chunk: Expr, depth: int, use: Callable[[Expr, Expr], None]) -> None:
        """Emit use(k, 16 columns at depth * chunk + k) for `depth` of K, as far as there is."""
        first, runs = chunk * (depth // RUN), depth // RUN
        with I.serial(I.min(runs, self.w.k // RUN - first)) as run:
            self._values(block, first + run, lambda e, values: use(run * RUN + e, values))
