"""y[i] = x[i'] w[expert of i]^T for CPUs: mixture-of-experts layers over packed weights, one row at a time.

Each row streams its expert's weights once. In prefill several rows of one expert could share that stream; they do
not yet, so mixture models prefill at the speed of their decode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function
from tir_schedules.cpu.block_weight import Blocks
from tir_schedules.cpu.packed_weight import LANES, Packed, codes, packed_of
from tir_schedules.cpu.store import store_row
from tir_schedules.cpu.vectors import Registers, load, read, splat
from tir_schedules.op import Op
from tir_schedules.rule import Declined, NamedRule, hand_written


@dataclass(frozen=True)
class Experts:
    """`count` experts, `top` of them for each token; `shared`: all of these read the same row of x."""

    count: int
    top: int
    shared: bool

    @property
    def x_rows(self) -> int:
        """Rows of x for a token."""
        return 1 if self.shared else self.top

    def chosen(self, ids: Buffer, pair: Expr) -> Expr:
        """The expert of a pair (token, choice)."""
        return self.nearest(ids[pair // self.top, pair % self.top])

    def nearest(self, expert: Expr) -> Expr:
        """The expert, or the nearest where there is none of that number."""
        return I.min(I.max(expert, 0), self.count - 1)

    def tensors(self, w: Packed) -> dict[str, Tensor]:
        """The stored arrays by parameter name."""
        return {name: Tensor((self.count, *a.shape), a.dtype) for name, a in w.arrays().items()}

    def flat(self, w: Packed, arrays: Iterable[Buffer]) -> list[Buffer]:
        """The stored arrays as of one weight, in which an expert's blocks come after those of the one before."""
        return [
            I.decl_buffer((self.count * a.shape[0], *a.shape[1:]), a.dtype, data=array.data)
            for a, array in zip(w.arrays().values(), arrays)
        ]

    def row(self, pair: Expr) -> Expr:
        """The row of x of a pair (token, choice)."""
        return pair // self.top if self.shared else pair


def experts_of(op: Op) -> Experts:
    """The experts of a tagged `expert_matmul`."""
    return Experts(op.int("experts"), op.int("top"), bool(op.int("shared")))


def expert_matmul(op: Op) -> tirx.PrimFunc | Declined:
    """x f32[m or m * top, K], packed W [experts], ids i32[m, top] -> y f32[m * top, N]."""
    if op.str("layout") != "rows16":
        return Declined(f"weight layout {op.str('layout')} has no CPU kernel")
    w, experts = packed_of(op), experts_of(op)
    m = tirx.Var("m", "int64")
    x, y = Tensor((m * experts.x_rows, w.k), "float32"), Tensor((m * experts.top, w.n), "float32")
    ids = Tensor((m, experts.top), "int32")

    def plain(X: Buffer, W: Buffer, IDS: Buffer, Y: Buffer) -> None:
        with I.serial(m * experts.top) as pair, I.parallel(w.blocks) as block:
            total = Registers(1, LANES)
            expert, row = I.bind(experts.chosen(IDS, pair)), I.bind(experts.row(pair))
            total[0] = splat(0.0, LANES)
            with I.serial(w.k) as k:
                total[0] = total[0] + load(W, (expert, block, k, 0), LANES) * splat(X[row, k], LANES)
            store_row(Y, pair, block, total)

    def quantized(X: Buffer, W: Buffer, S: Buffer, IDS: Buffer, Y: Buffer) -> None:
        with I.serial(m * experts.top) as pair, I.parallel(w.blocks) as block:
            total, part = Registers(1, LANES), Registers(2, LANES)
            expert, row = I.bind(experts.chosen(IDS, pair)), I.bind(experts.row(pair))
            total[0] = splat(0.0, LANES)
            with I.serial(w.groups) as g:
                _sum_group(w, X, W, part, (expert, block), row, g)
                total[0] = total[0] + (part[0] + part[1]) * load(S, (expert, block, g, 0), LANES)
            store_row(Y, pair, block, total)

    def blocked(X: Buffer, *rest: Buffer) -> None:
        *arrays, IDS, Y = rest
        weight = Blocks(w, *experts.flat(w, arrays))
        with I.serial(m * experts.top) as pair, I.parallel(w.blocks) as block:
            expert, row = I.bind(experts.chosen(IDS, pair)), I.bind(experts.row(pair))
            store_row(Y, pair, block, weight.sums(X, expert * w.blocks + block, row, row + 1, 1))

    body = plain if w.bits == 0 else blocked if w.blocked else quantized
    return function(body.__name__, {"x": x, **experts.tensors(w), "ids": ids, "y": y}, body)


def _sum_group(
    w: Packed, X: Buffer, W: Buffer, part: Registers, block: tuple[Expr, Expr], row: Expr, group: Expr
) -> None:
    """part[0] + part[1] = X[row] times the codes of a group, less their zero point; `block` is (expert, block)."""
    part[0] = splat(0.0, LANES)
    part[1] = splat(0.0, LANES)
    with I.serial(w.words_per_group) as j, I.unroll(w.codes_per_word) as c:
        k = group * w.group_size + j * w.codes_per_word + c
        with I.If(k < w.k), I.Then():
            word = read(W, (*block, group * w.words_per_group + j, 0), LANES)
            code = codes(word, c, w.bits) - splat(float(w.zero_point), LANES)
            part[c % 2] = part[c % 2] + code * splat(X[row, k], LANES)


RULES = (NamedRule("cpu.expert_matmul", ("expert_matmul",), hand_written(lambda _, op, knobs: expert_matmul(op))),)
