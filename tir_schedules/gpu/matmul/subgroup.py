"""Matmuls with packed weights on subgroups of a known size; `packed_loads.py` says how they load.

GEMV, one row of x: groups of 8 lanes share the columns, and so do subgroups of a workgroup if there are few rows. A
lane has a unit of 64 columns in flight, 16 bytes a load: 144 bytes of int4 weights and scales. By Little's law a GPU
needs bandwidth times latency in flight. A Radeon RX 7900 XTX: 960 GB/s x 0.5 us = 480 KB, 5 KB for each of its 96
compute units. One subgroup of 32 lanes has 4.6 KB, so two a unit hide the arithmetic too. An Arc A770: 448 GB/s x
0.8 us = 360 KB, 11 KB for each of 32 cores: three subgroups of 32 or six of 16.

GEMM: each group of 8 lanes has its own blocks; a lane has `gemm_rows` rows of x by 4 `gemm_blocks` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.activation import ACTIVATIONS
from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.gpu.kernel import barrier, by_rows, ceildiv, keep, launch, local, pin, shared
from tir_schedules.gpu.matmul import coopmat, experts_mma, mma, mma_few, mma_staged
from tir_schedules.gpu.matmul.output import Output
from tir_schedules.gpu.matmul.packed import BLOCK_ROWS, Packed, is_lm_head
from tir_schedules.gpu.matmul.packed_loads import (
    GROUP_LANES,
    LANE_ROWS,
    Held,
    Lanes,
    Weights,
    Xs,
    lanes_of,
    packed_for_groups,
)
from tir_schedules.gpu.matmul.planes import RUN, RUN_STEPS, Kept, Scale
from tir_schedules.gpu.matmul.row_tile import RowTiles, by_tiles
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype

_MAX_SUBGROUPS = 8  # of a workgroup


@dataclass(frozen=True)
class _Tile:
    """`sums` [row of x, block, 4]: products of rows of x and the lane's four rows of each block."""

    weights: Weights
    blocks: Sequence[Expr]
    xs: Xs
    sums: Buffer

    @property
    def columns(self) -> int:
        return LANE_ROWS * len(self.blocks)

    def sums_of(self, i: int, r: int, outputs: int) -> list[Expr]:
        """The sums of row i of x and output block r of so many, with those of its gate."""
        count = self.columns // outputs
        return [self.sums[i * self.columns + r * count + c] for c in range(count)]

    def unit(self, unit: Expr) -> None:
        """Add the products of a unit's columns."""
        w = self.weights.weight
        if w.kept is not None:
            self._kept_unit(unit, w.kept)
            return
        scales = [self.weights.scales(block, unit) for block in self.blocks]
        parts = len(scales[0])  # quantization groups
        steps = self.weights.steps // parts
        with self._loop(parts) as part:
            part_scales = [self._of_part(block_scales, part) for block_scales in scales]
            with self._loop(steps) as i:
                self._step(keep((unit * parts + part) * steps + i), part_scales)

    def _loop(self, count: int) -> AbstractContextManager[Expr]:
        """One row has few sums, which leaves registers to load a whole unit at once."""
        frame = (I.unroll if len(self.xs.lines) == 1 and not self.xs.shuffled else I.serial)(0, count)
        loop: AbstractContextManager[Expr] = frame
        return loop

    def _kept_unit(self, unit: Expr, kept: Kept) -> None:
        """The same for a block format, in whole runs: numbers are loaded where they begin to apply."""
        w, runs = self.weights, self.weights.steps // RUN_STEPS
        once = kept.span % (runs * RUN) == 0
        stored = [w.stored_scales(b, keep(unit * runs * RUN)) if once else None for b in self.blocks]
        halves = 2 if kept.part < RUN or 2 in kept.words(0) else 1
        with self._loop(runs) as i:
            run = keep(unit * runs + i)
            held = [w.held(b, run, 1) for b in self.blocks]
            with self._loop(halves) as half:
                first = keep(half * (RUN_STEPS // halves))
                both = [{**known, **w.held(b, run, 2, half)} for b, known in zip(self.blocks, held)]
                scales = [w.kept_scales(b, run, first, s) for b, s in zip(self.blocks, stored)]
                if halves == 2 and len(self.xs.lines) == 1:
                    for j in range(2):
                        self._kept_step(run, keep(first + j), both, scales)
                else:
                    with self._loop(RUN_STEPS // halves) as j:
                        self._kept_step(run, keep(first + j), both, scales)

    def _kept_step(self, run: Expr, step: Expr, held: Sequence[Held], scales: Sequence[Sequence[Scale]]) -> None:
        xs = self.xs.step(keep(run * RUN_STEPS + step))
        words = [self.weights.kept_step(block, run, step, known) for block, known in zip(self.blocks, held)]
        self._products(xs, [self.weights.joined(of_block, step) for of_block in words], scales)

    @staticmethod
    def _of_part(scales: list[list[Expr]], part: Expr) -> list[Expr]:
        if len(scales) == 1:
            return scales[0]
        return [pin(I.Select(part == 0, first, second)) for first, second in zip(*scales)]

    def _step(self, step: Expr, scales: Sequence[Sequence[Any]]) -> None:
        xs = self.xs.step(step)
        self._products(xs, [self.weights.step(block, step) for block in self.blocks], scales)

    def _products(self, xs: list[list[Expr]], stored: list[list[list[Expr]]], scales: Sequence[Sequence[Any]]) -> None:
        """Add the products of eight columns."""
        if len(xs) == 1 or not self.xs.shuffled:
            for j in range(GROUP_LANES):
                values = self._values(stored, j, scales)
                for i, row in enumerate(xs):
                    self._add(i, self.xs.column(row, j), values)
            return
        # A processor has few registers: the sums of one row at a time.
        columns = [self._values(stored, j, scales) for j in range(GROUP_LANES)]
        for i, row in enumerate(xs):
            for j, values in enumerate(columns):
                self._add(i, self.xs.column(row, j), values)

    def _values(self, stored: list[list[list[Expr]]], j: int, scales: Sequence[Sequence[Any]]) -> list[Expr]:
        """Column j of a step in all blocks."""
        return [pin(value) for words, scale in zip(stored, scales) for value in self.weights.column(words, j, scale)]

    def _add(self, i: int, x: Expr, values: list[Expr]) -> None:
        """Add the products of x, of row i, and a column."""
        for c, value in enumerate(values):
            put(self.sums, i * self.columns + c, self.sums[i * self.columns + c] + x * value)


def _tile(weights: Weights, blocks: Sequence[Expr], xs: Xs) -> _Tile:
    sums = local(len(xs.lines) * LANE_ROWS * len(blocks))
    tile = _Tile(weights, blocks, xs, sums)
    for i in range(len(xs.lines) * tile.columns):
        put(sums, i, 0.0)
    return tile


def _flat(buffer: Buffer, size: Expr) -> Buffer:
    return I.decl_buffer((size,), str(buffer.dtype), data=buffer.data)


def subgroup_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x dtype[m, k], packed w [n, k] -> y dtype[m, n], or [m, n / 2] for `gated_matmul`; `subgroup` is set.

    k is whole quantization groups of whole 8 columns. Few rows by GEMV; many by GEMM on `mma` (int4 and int8 groups of
    32, or plain float16), else on cooperative matrices (`matrix_rows`, float16, k a multiple of 32), else in registers.
    """
    size = int(knobs.get("subgroup", 0))
    weight = packed_for_groups(op) if size else Declined("subgroups of unknown size")
    if isinstance(weight, Declined):
        return weight
    gated = op.kind == "gated_matmul"
    width = weight.n // 2 if gated else weight.n
    if gated and width % BLOCK_ROWS:
        return Declined(f"a gate of {width} rows")
    m = tirx.Var("m", "int64")
    arguments = {"x": Tensor((m, weight.k), dtype), **weight.arguments(weight.sizes()), "y": Tensor((m, width), dtype)}
    activation = ACTIVATIONS[op.str("activation")] if gated else None

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, output = rest[:-1], Output(_flat(rest[-1], m * width), width, activation)
        flat = _flat(x, m * weight.k)

        def gemv(tiles: RowTiles) -> None:
            shape = _gemv_shape(weight, knobs, size, gated, tiles.rows)
            with tiles.launch(shape.threads, shape.groups) as (bx, tile, _):
                lanes = lanes_of(size)
                # `keep`, not `pin`: TVM has to see that x can be loaded in vectors.
                lines = [keep(row * weight.k) for row in tiles.of(tile)]
                xs = Xs(flat, lines, lanes, bool(knobs["shuffle_x"]))

                def store(i: int, *values: Expr) -> None:
                    with tiles.stored(tile, i):
                        output.put(tile * tiles.rows + i, *values)

                _gemv(Weights(weight, arrays, lanes.lane), shape, bx, xs, store)

        def few() -> None:
            if mma.fits(weight, dtype, knobs):
                mma_few.few(op, weight, arrays, flat, output, m, knobs)
            else:
                by_tiles(op, m, knobs, 2 * LANE_ROWS if gated else LANE_ROWS, gemv)

        if not gated and is_lm_head(weight.n, weight.k):
            few()
            return

        def gemm() -> None:
            if mma.fits(weight, dtype, knobs) and mma_staged.fits(weight):
                mma_staged.gemm(weight, arrays, flat, output, m)
            elif mma.fits(weight, dtype, knobs):
                mma.gemm(weight, arrays, flat, output, m, knobs)
            elif coopmat.fits(weight, dtype, knobs, gated):
                coopmat.gemm(weight, arrays, flat, output.put, m, knobs, gated)
            else:
                _gemm(weight, arrays, flat, output, m, size, knobs)

        by_rows(op, m, few, gemm)

    return function("matmul", arguments, body)


@dataclass(frozen=True)
class _GemvShape:
    """`groups` workgroups of `subgroups`, which share the columns of `blocks` blocks of the weight and of their gates.

    A subgroup has `size` lanes.
    """

    blocks: int
    subgroups: int
    groups: int
    size: int
    gated: bool

    @property
    def threads(self) -> int:
        return self.size * self.subgroups


def _gemv_shape(weight: Packed, knobs: Knobs, size: int, gated: bool, rows: int = 1) -> _GemvShape:
    """As many subgroups as keep the device busy, while each group of 8 lanes has at least one unit of columns.

    For `rows` rows of x as many as for one, so that their sums are added in the same order, and fewer blocks.
    """
    outputs = weight.blocks // 2 if gated else weight.blocks
    blocks = min(max(1, int(knobs["gemv_blocks"]) // (2 if gated else 1)), outputs)
    groups = -(-outputs // blocks)
    units = Weights(weight, (), 0).units
    max_subgroups = max(1, min(_MAX_SUBGROUPS, int(knobs["gemv_invocations"]) // (groups * size)))
    subgroups = 1
    while 2 * subgroups <= max_subgroups and units >= 2 * subgroups * size // GROUP_LANES:
        subgroups *= 2
    if rows > 1:
        blocks = min(blocks, int(knobs["gemv_sums"]) // (rows * LANE_ROWS * (2 if gated else 1)))
    return _GemvShape(blocks, subgroups, -(-outputs // blocks), size, gated)


def _gemv(weights: Weights, shape: _GemvShape, bx: Expr, xs: Xs, store: Callable[..., None]) -> None:
    """store(row of x, block, the lane's sums, lane) for the blocks of a workgroup."""
    lanes, w = xs.lanes, weights.weight
    outputs = w.blocks // 2 if shape.gated else w.blocks
    first = [bx * shape.blocks + r for r in range(shape.blocks)]
    if outputs % shape.blocks:
        first = [keep(I.min(block, outputs - 1)) for block in first]
    blocks = [block + half for block in first for half in ((0, outputs) if shape.gated else (0,))]
    tile = _tile(weights, blocks, xs)
    share = shape.size // GROUP_LANES * shape.subgroups
    part = 0 if share == 1 else keep(lanes.subgroup * (shape.size // GROUP_LANES) + lanes.group)
    with I.serial(0, weights.units // share) as i:
        tile.unit(keep(i * share + part))
    if weights.units % share:
        with I.If(part < weights.units % share), I.Then():
            tile.unit(keep(weights.units // share * share + part))
    sums = tile.columns * len(xs.lines)
    lanes.sum_over_groups(tile.sums, sums)
    if shape.subgroups > 1:
        _sum_subgroups(tile.sums, sums, shape, lanes)

    def finish() -> None:
        for i in range(len(xs.lines)):
            for r, block in enumerate(first):
                store(i, block, tile.sums_of(i, r, shape.blocks), lanes.lane)

    if share == 1:
        finish()
        return
    with I.If(part == 0), I.Then():
        finish()


def _sum_subgroups(sums: Buffer, count: int, shape: _GemvShape, lanes: Lanes) -> None:
    """The first group of 8 lanes of the workgroup gets the sums of all subgroups."""
    parts = shared(shape.subgroups * GROUP_LANES * count)
    with I.If(lanes.group == 0), I.Then():
        for c in range(count):
            put(parts, (lanes.subgroup * count + c) * GROUP_LANES + lanes.lane, sums[c])
    barrier()
    with I.If(I.And(lanes.group == 0, lanes.subgroup == 0)), I.Then():
        for other in range(1, shape.subgroups):
            for c in range(count):
                put(sums, c, sums[c] + parts[(other * count + c) * GROUP_LANES + lanes.lane])


def _gemm(
    weight: Packed, arrays: tuple[Buffer, ...], x: Buffer, output: Output, m: Expr, size: int, knobs: Knobs
) -> None:
    """Every group of 8 lanes has its own rows of x and blocks: no invocation waits for another."""
    gated, gemm_rows = output.activation is not None, int(knobs["gemm_rows"])
    outputs = weight.blocks // 2 if gated else weight.blocks
    count = min(max(1, int(knobs["gemm_blocks"]) // (2 if gated else 1)), outputs)
    with launch(size, ceildiv(outputs, count * (size // GROUP_LANES)), ceildiv(m, gemm_rows)) as (bx, by, _):
        lanes = lanes_of(size)
        last = keep(I.cast(m, "int32") - 1)
        begin = (bx * (size // GROUP_LANES) + lanes.group) * count
        first = [pin(I.min(begin + r, outputs - 1)) for r in range(count)]
        blocks = [block + half for block in first for half in ((0, outputs) if gated else (0,))]
        lines = [pin(I.min(by * gemm_rows + i, last) * weight.k) for i in range(gemm_rows)]
        weights = Weights(weight, arrays, lanes.lane)
        tile = _tile(weights, blocks, Xs(x, lines, lanes, bool(knobs["shuffle_x"])))
        with I.serial(0, weights.units) as unit:
            tile.unit(unit)
        for i in range(gemm_rows):
            with I.If(by * gemm_rows + i <= last), I.Then():
                for r, block in enumerate(first):
                    output.put(by * gemm_rows + i, block, tile.sums_of(i, r, count), lanes.lane)


def subgroup_expert_matmul(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """x [m, k] (`shared`) or [m * top, k], packed w [experts, n, k], ids i32[m, top] -> y dtype[m * top, n]."""
    size = int(knobs.get("subgroup", 0))
    weight = packed_for_groups(op) if size else Declined("subgroups of unknown size")
    if isinstance(weight, Declined):
        return weight
    per_token, shared_x = op.int("top"), bool(op.int("shared"))
    m = tirx.Var("m", "int64")
    rows = m if shared_x else m * per_token
    arguments = {
        "x": Tensor((rows, weight.k), dtype),
        **weight.arguments(weight.sizes()),
        "ids": Tensor((m, per_token), "int32"),
        "y": Tensor((m * per_token, weight.n), dtype),
    }
    shape = _gemv_shape(weight, knobs, size, gated=False)

    def body(x: Buffer, *rest: Buffer) -> None:
        arrays, ids = rest[:-2], rest[-2]
        output, flat = Output(_flat(rest[-1], m * per_token * weight.n), weight.n, None), _flat(x, rows * weight.k)

        def gemv() -> None:
            with launch(shape.threads, shape.groups, m * per_token) as (bx, i, _):
                lanes = lanes_of(size)
                expert = keep(I.min(I.max(ids[i // per_token, i % per_token], 0), weight.experts - 1))
                line = keep((i // per_token if shared_x else i) * weight.k)
                xs = Xs(flat, [line], lanes, bool(knobs["shuffle_x"]))
                weights = Weights(weight, arrays, lanes.lane, expert)
                _gemv(weights, shape, bx, xs, lambda _, *values: output.put(i, *values))

        if not mma.fits(weight, dtype, knobs):
            gemv()
            return
        routing = experts_mma.Routing(ids, m, per_token, shared_x)
        by_rows(
            op,
            m,
            gemv,
            lambda: experts_mma.gemm(weight, arrays, flat, output, routing, knobs),
        )

    return function("expert_matmul", arguments, body)


RULES = (
    NamedRule("gpu.subgroup_matmul", ("matmul", "gated_matmul"), with_output_dtype(subgroup_matmul), "gpu.matmul"),
    NamedRule(
        "gpu.subgroup_expert_matmul", ("expert_matmul",), with_output_dtype(subgroup_expert_matmul), "gpu.expert_matmul"
    ),
)
