"""Matmuls with packed weights where the size of a subgroup is known: `octets.py` says how they read.

GEMV, one row of x: the octets of a subgroup, and subgroups of a workgroup where there are few rows, share the columns.
A lane has a unit of 64 columns in flight, 16 bytes a load: 144 bytes of int4 weights and scales. By Little's law a GPU
needs bandwidth times latency on the way: 960 GB/s x 0.5 us = 480 KB for a Radeon RX 7900 XTX, 5 KB for each of its 96
compute units, which one subgroup of 32 lanes has (4.6 KB), so that two a unit hide the arithmetic too; 448 GB/s x
0.8 us = 360 KB for an Arc A770, 11 KB for each of 32 cores, which are three subgroups of 32 or six of 16.
GEMM: the octets of a subgroup have different blocks, and each lane `rows` rows of x by 4 `blocks` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.gpu import matrix_matmul, mma_experts, mma_matmul
from tir_schedules.gpu.kernel import (
    Buffer,
    Expr,
    Tensor,
    barrier,
    ceildiv,
    function,
    keep,
    launch,
    local,
    pin,
    put,
    shared,
)
from tir_schedules.gpu.matmul import LANES, Packed
from tir_schedules.gpu.octets import OCTET, ROWS, Knobs, Lanes, Weights, Xs, fitting, lanes_of, put_neighbours
from tir_schedules.op import Declined, Op

# Columns for each input that only a head to the vocabulary has: it multiplies few rows, and needs no GEMM's shader.
_HEAD = 12
_MOST_SUBGROUPS = 8  # of a workgroup


@dataclass(frozen=True)
class _Tile:
    """`sums`: the products of rows of x and the lane's four rows of some blocks, [row of x, block, 4]."""

    weights: Weights
    blocks: Sequence[Expr]
    xs: Xs
    sums: Buffer

    @property
    def width(self) -> int:
        return ROWS * len(self.blocks)

    def unit(self, unit: Expr) -> None:
        """Adds the products of a unit's columns."""
        scales = [self.weights.scales(block, unit) for block in self.blocks]
        parts = len(scales[0])
        steps = self.weights.steps // parts
        # All loads of a unit are on their way at once where registers are not those of many sums.
        loop = I.unroll if len(self.xs.lines) == 1 and not self.xs.shuffled else I.serial
        with loop(0, parts) as part:
            chosen = [self._of_part(found, part) for found in scales]
            with loop(0, steps) as i:
                self._step(keep((unit * parts + part) * steps + i), chosen)

    @staticmethod
    def _of_part(scales: list[list[Expr]], part: Expr) -> list[Expr]:
        if len(scales) == 1:
            return scales[0]
        return [pin(I.Select(part == 0, first, second)) for first, second in zip(*scales)]

    def _step(self, step: Expr, scales: list[list[Expr]]) -> None:
        xs = self.xs.step(step)
        stored = [self.weights.step(block, step) for block in self.blocks]
        for j in range(OCTET):
            values = [
                pin(value)
                for words, scale in zip(stored, scales)
                for value in self.weights.column(words, j, scale)
            ]
            for i, row in enumerate(xs):
                x = self.xs.column(row, j)
                for c, value in enumerate(values):
                    put(self.sums, i * self.width + c, self.sums[i * self.width + c] + x * value)


def _tile(weights: Weights, blocks: Sequence[Expr], xs: Xs) -> _Tile:
    sums = local(len(xs.lines) * ROWS * len(blocks))
    tile = _Tile(weights, blocks, xs, sums)
    for i in range(len(xs.lines) * tile.width):
        put(sums, i, 0.0)
    return tile


@dataclass(frozen=True)
class _Output:
    """y [m, width]; `gated`: of the activation of one half of the weight's rows times the other half."""

    flat: Buffer
    width: int
    activation: Callable[[Expr], Expr] | None

    def put(self, row: Expr, block: Expr, values: Sequence[Expr], lane: Expr) -> None:
        """What a lane has of a block; two numbers for each column where gated."""
        if self.activation is not None:
            gates, others = values[:ROWS], values[ROWS:]
            values = [self.activation(gate) * other for gate, other in zip(gates, others)]
        column = keep(block * LANES + lane * ROWS)
        if self.width % LANES == 0:
            put_neighbours(self.flat, row * self.width + column, values)
            return
        for i, value in enumerate(values):
            with I.If(column + i < self.width), I.Then():
                put(self.flat, row * self.width + column + i, value)


def _flat(buffer: Buffer, size: Expr) -> Buffer:
    return I.decl_buffer((size,), str(buffer.dtype), data=buffer.data)


def subgroup_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """As `matmul.matmul`: x dtype[m, k], packed w [n, k] -> dtype[m, n], or [m, n / 2] for `gated_matmul`."""
    size = int(knobs.get("subgroup", 0))
    weight = fitting(op) if size else Declined("subgroups of no known size")
    if isinstance(weight, Declined):
        return weight
    gated = op.kind == "gated_matmul"
    width = weight.n // 2 if gated else weight.n
    if gated and width % LANES:
        return Declined(f"a gate of {width} rows")
    m = tirx.Var("m", "int64")
    arguments = {"x": Tensor((m, weight.k), dtype), **Weights.arguments(weight), "y": Tensor((m, width), dtype)}
    activation = ACTIVATIONS[op.str("activation")] if gated else None

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, output = rest[:-1], _Output(_flat(rest[-1], m * width), width, activation)
        flat = _flat(x, m * weight.k)

        def gemv() -> None:
            shape = _gemv_shape(weight, knobs, size, gated)
            with launch(shape.threads, shape.groups, m) as (bx, i, _):
                lanes = lanes_of(size)
                # Not pinned, so that TVM sees that x can be loaded in vectors.
                xs = Xs(flat, [keep(i * weight.k)], lanes, bool(knobs["shuffle_x"]))
                _gemv(Weights(weight, arrays, lanes.lane), shape, bx, xs, lambda *values: output.put(i, *values))

        if not gated and weight.n >= _HEAD * weight.k:
            gemv()
            return
        with I.If(m <= int(knobs["gemv_max_rows"])):
            with I.Then():
                gemv()
            with I.Else():
                if mma_matmul.fits(weight, dtype, knobs):
                    mma_matmul.gemm(weight, arrays, flat, output, m, knobs)
                elif matrix_matmul.fits(weight, dtype, knobs, gated):
                    matrix_matmul.gemm(weight, arrays, flat, output.put, m, knobs, gated)
                else:
                    _gemm(weight, arrays, flat, output, m, size, knobs)

    return function("matmul", arguments, body)


@dataclass(frozen=True)
class _GemvShape:
    """A workgroup has `subgroups`, which share the columns of `blocks` blocks of rows, and of their gates."""

    blocks: int
    subgroups: int
    groups: int
    size: int
    gated: bool

    @property
    def threads(self) -> int:
        return self.size * self.subgroups


def _gemv_shape(weight: Packed, knobs: Knobs, size: int, gated: bool) -> _GemvShape:
    """As many subgroups as it takes to keep the device busy, while each octet has a unit of columns at least."""
    outputs = weight.blocks // 2 if gated else weight.blocks
    blocks = min(max(1, int(knobs["gemv_blocks"]) // (2 if gated else 1)), outputs)
    groups = -(-outputs // blocks)
    units = Weights(weight, (), 0).units
    most = max(1, min(_MOST_SUBGROUPS, int(knobs["gemv_invocations"]) // (groups * size)))
    subgroups = 1
    while 2 * subgroups <= most and units >= 2 * subgroups * size // OCTET:
        subgroups *= 2
    return _GemvShape(blocks, subgroups, groups, size, gated)


def _gemv(weights: Weights, shape: _GemvShape, bx: Expr, xs: Xs, store: Callable[..., None]) -> None:
    """store(block, the lane's numbers, lane) of the blocks of a workgroup."""
    lanes, w = xs.lanes, weights.weight
    outputs = w.blocks // 2 if shape.gated else w.blocks
    first = [bx * shape.blocks + r for r in range(shape.blocks)]
    if outputs % shape.blocks:
        first = [keep(I.min(block, outputs - 1)) for block in first]
    blocks = [block + half for block in first for half in ((0, outputs) if shape.gated else (0,))]
    tile = _tile(weights, blocks, xs)
    share = shape.size // OCTET * shape.subgroups
    part = 0 if share == 1 else keep(lanes.subgroup * (shape.size // OCTET) + lanes.octet)
    with I.serial(0, weights.units // share) as i:
        tile.unit(keep(i * share + part))
    if weights.units % share:
        with I.If(part < weights.units % share), I.Then():
            tile.unit(keep(weights.units // share * share + part))
    lanes.sum_of_octets(tile.sums, tile.width)
    if shape.subgroups > 1:
        _sum_subgroups(tile.sums, tile.width, shape, lanes)
    each = tile.width // shape.blocks

    def finish() -> None:
        for r, block in enumerate(first):
            store(block, [tile.sums[r * each + c] for c in range(each)], lanes.lane)

    if share == 1:
        finish()
        return
    with I.If(part == 0), I.Then():
        finish()


def _sum_subgroups(sums: Buffer, count: int, shape: _GemvShape, lanes: Lanes) -> None:
    """The first octet of the workgroup gets the sums of all subgroups."""
    parts = shared(shape.subgroups * OCTET * count)
    with I.If(lanes.octet == 0), I.Then():
        for c in range(count):
            put(parts, (lanes.subgroup * count + c) * OCTET + lanes.lane, sums[c])
    barrier()
    with I.If(I.And(lanes.octet == 0, lanes.subgroup == 0)), I.Then():
        for other in range(1, shape.subgroups):
            for c in range(count):
                put(sums, c, sums[c] + parts[(other * count + c) * OCTET + lanes.lane])


def _gemm(
    weight: Packed, arrays: tuple[Buffer, ...], x: Buffer, output: _Output, m: Expr, size: int, knobs: Knobs
) -> None:
    """Every octet has rows of x and blocks of its own: no invocation waits for another."""
    gated, height = output.activation is not None, int(knobs["gemm_rows"])
    outputs = weight.blocks // 2 if gated else weight.blocks
    count = min(max(1, int(knobs["gemm_blocks"]) // (2 if gated else 1)), outputs)
    with launch(size, ceildiv(outputs, count * (size // OCTET)), ceildiv(m, height)) as (bx, by, _):
        lanes = lanes_of(size)
        last = keep(I.cast(m, "int32") - 1)
        begin = (bx * (size // OCTET) + lanes.octet) * count
        first = [pin(I.min(begin + r, outputs - 1)) for r in range(count)]
        blocks = [block + half for block in first for half in ((0, outputs) if gated else (0,))]
        lines = [pin(I.min(by * height + i, last) * weight.k) for i in range(height)]
        weights = Weights(weight, arrays, lanes.lane)
        tile = _tile(weights, blocks, Xs(x, lines, lanes, bool(knobs["shuffle_x"])))
        with I.serial(0, weights.units) as unit:
            tile.unit(unit)
        each = tile.width // count
        for i in range(height):
            with I.If(by * height + i <= last), I.Then():
                for r, block in enumerate(first):
                    at = i * tile.width + r * each
                    output.put(by * height + i, block, [tile.sums[at + c] for c in range(each)], lanes.lane)


def subgroup_expert_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """As `matmul.expert_matmul`: x [m, k] (`shared`) or [m * top, k], w [experts, n, k], ids i32[m, top] -> y."""
    size = int(knobs.get("subgroup", 0))
    weight = fitting(op) if size else Declined("subgroups of no known size")
    if isinstance(weight, Declined):
        return weight
    top, common = op.int("top"), bool(op.int("shared"))
    m = tirx.Var("m", "int64")
    rows = m if common else m * top
    arguments = {
        "x": Tensor((rows, weight.k), dtype),
        **Weights.arguments(weight),
        "ids": Tensor((m, top), "int32"),
        "y": Tensor((m * top, weight.n), dtype),
    }
    shape = _gemv_shape(weight, knobs, size, gated=False)

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, ids = rest[:-2], rest[-2]
        output, flat = _Output(_flat(rest[-1], m * top * weight.n), weight.n, None), _flat(x, rows * weight.k)

        def gemv() -> None:
            with launch(shape.threads, shape.groups, m * top) as (bx, i, _):
                lanes = lanes_of(size)
                expert = keep(I.min(I.max(ids[i // top, i % top], 0), weight.experts - 1))
                line = keep((i // top if common else i) * weight.k)
                xs = Xs(flat, [line], lanes, bool(knobs["shuffle_x"]))
                weights = Weights(weight, arrays, lanes.lane, expert)
                _gemv(weights, shape, bx, xs, lambda *values: output.put(i, *values))

        if not mma_matmul.fits(weight, dtype, knobs):
            gemv()
            return
        with I.If(m <= int(knobs["gemv_max_rows"])):
            with I.Then():
                gemv()
            with I.Else():
                mma_experts.gemm(weight, arrays, flat, output, ids, m, top, common, knobs)

    return function("expert_matmul", arguments, body)
