"""One or two rows with the arithmetic of `int8_gemm.py`: bytes go from codes to dot products without scratch.

Scratch pays where several panels read it. A chat's first prompt after a load, and what a chat adds to a cached one,
may be as short as this; the numbers are those of a longer prompt, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.cpu.int8_activations import Groups, Panels, alloc_panels, quantize_group
from tir_schedules.cpu.int8_dot import Dot, Weight
from tir_schedules.cpu.int8_few_rows import Ask
from tir_schedules.cpu.int8_gemm import requantize
from tir_schedules.cpu.int8_unpacked import GROUP
from tir_schedules.cpu.packed_weight import LANES
from tir_schedules.cpu.store import Output
from tir_schedules.cpu.vectors import Registers, read, splat

ROWS = 2


@dataclass(frozen=True)
class _Products:
    """Takes a chunk of one block from `requantize`: `sums` int32 += its bytes times ROWS rows of x."""

    panels: Panels
    chunk: Expr
    size: int
    scales: Buffer
    sums: Registers
    dot: Dot

    def put_eight(self, i: Expr, b: Expr, v: Expr, half: Registers) -> None:
        """The i-th eight bytes of the v-th vector of the block's rows, from two vectors of words."""
        vectors, first = LANES // half.lanes, self.chunk * (self.size // 4) + i * 2
        with I.unroll(2) as h, I.unroll(ROWS) as r:
            bytes_ = I.reinterpret(f"int8x{4 * half.lanes}", half[h])
            at = r * vectors + v
            self.sums[at] = self.dot(self.sums[at], bytes_, self.panels.words[0, first + h, r], 4)


def gemm_few_rows(X: Buffer, weight: Weight, Y: Buffer, m: Expr, depth: int, groups: Groups, ask: Ask) -> None:
    """Emit y = x W^T for m <= ROWS, in parallel over blocks; sums over `depth` of K are added as `gemm` adds them."""
    lanes, packed, dot, slots = weight.dot.lanes, weight.packed, weight.dot, depth // groups.size
    vectors, runs, panels = LANES // lanes, groups.size // GROUP, alloc_panels(groups, 1, ROWS)
    with I.serial(groups.count) as g, I.serial(ROWS) as r:
        quantize_group(X, I.min(r, m - 1), g, panels, 0, r)
    with I.parallel(packed.blocks) as block:
        total, sums = Registers(ROWS * vectors, lanes), Registers(ROWS * vectors, lanes, "int32")
        scales = I.alloc_buffer((1, 1, LANES), "float32")
        with I.serial(-(-groups.count // slots)) as d:
            with I.unroll(ROWS * vectors) as i:
                total[i] = splat(0.0, lanes)
            with I.serial(I.min(slots, groups.count - d * slots)) as slot:
                chunk = d * slots + slot

                def ask_group(g: Expr, first: Expr = chunk * runs, block: Expr = block) -> None:
                    ask(block, first + g, packed.bits, 1)

                with I.unroll(ROWS) as r, I.unroll(vectors) as v:
                    sums[r * vectors + v] = splat(panels.corrections[0, chunk, r], lanes)
                products = _Products(panels, chunk, groups.size, scales, sums, dot)
                requantize(weight, block, chunk, products, 0, 0, ask_group)
                with I.unroll(ROWS) as r, I.unroll(vectors) as v:
                    scale = read(scales, (0, 0, v * lanes), lanes) * splat(panels.scales[0, chunk, r], lanes)
                    i = r * vectors + v
                    total[i] = total[i] + I.cast(sums[i], f"float32x{lanes}") * scale
            Output(Y, 0, m, block, ROWS, 1, d > 0).store(total)
