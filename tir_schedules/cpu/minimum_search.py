"""Quantization of groups with a scale and a minimum: the pair of least error, 16 groups at a time as in `scale_search`.

Of a group x, scale s and minimum m leave sum(h (x - s q - m)^2) with codes q, where h is the importance of each column.
For given codes the best pair is that of a straight line through (q, x). The codes of a few scales around
(max - min) / top are tried, and then those that their line gives; of all the line that leaves the least is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.cpu.scale_search import LANES, for_blocks
from tir_schedules.cpu.vectors import Registers, read, splat, store

# Scales that are tried, in steps of 0.1 / top of the widest, and lines for each.
_TRIED, _STEP, _LINES = 19, 0.1, 2


def minimum_search(size: int, bits: int) -> tirx.PrimFunc:
    """x f32[groups, size], importance f32[c, size] -> scales, minima f32[groups]; see `scale_search`."""
    groups, columns = tirx.Var("groups", "int64"), tirx.Var("columns", "int64")
    arguments = {
        "x": Tensor((groups, size), "float32"),
        "importance": Tensor((columns, size), "float32"),
        "scales": Tensor((groups,), "float32"),
        "minima": Tensor((groups,), "float32"),
    }

    def body(x: Buffer, importance: Buffer, scales: Buffer, minima: Buffer) -> None:
        def block(values: Buffer, weights: Buffer, group_of: Callable[[Expr], Expr]) -> None:
            low, width = _normalize(values, size)
            line = _best_line(values, weights, size, (1 << bits) - 1)
            found = Registers(2, LANES)
            found[0], found[1] = line[0] * width, line[1] * width + low
            with I.serial(LANES) as lane:
                put(scales, group_of(lane), found.memory[0, lane])
                put(minima, group_of(lane), found.memory[1, lane])

        for_blocks(x, importance, block)

    return function("minimum_search", arguments, body)


def _normalize(values: Buffer, size: int) -> tuple[Expr, Expr]:
    """Emit values = (values - min) / (max - min) -> min and max - min, 1 for a group of equal numbers."""
    low, high = Registers(1, LANES), Registers(1, LANES)
    low[0] = high[0] = read(values, (0, 0), LANES)
    with I.serial(size) as e:
        low[0] = I.min(low[0], read(values, (e, 0), LANES))
        high[0] = I.max(high[0], read(values, (e, 0), LANES))
    high[0] = high[0] - low[0]
    high[0] = I.Select(high[0] > splat(0.0, LANES), high[0], splat(1.0, LANES))
    with I.serial(size) as e:
        store(values, (e, 0), (read(values, (e, 0), LANES) - low[0]) / high[0], LANES)
    return low[0], high[0]


def _best_line(values: Buffer, weights: Buffer, size: int, top: int) -> Registers:
    """Emit the search in normalized values -> scale and minimum."""
    sums, line, best, won = Registers(5, LANES), Registers(2, LANES), Registers(2, LANES), Registers(1, LANES)
    zero = splat(0.0, LANES)
    best[0], best[1], won[0] = zero, zero, splat(-1.0, LANES)
    with I.serial(_TRIED) as t:
        factor = I.float32(top) + I.cast(t - _TRIED // 2, "float32") * I.float32(_STEP)
        line[0], line[1] = splat(I.float32(1) / factor, LANES), zero
        with I.serial(_LINES):
            _add_up(values, weights, size, top, line, sums)
            q, qq, x, qx, weight = (sums[i] for i in range(5))
            spread, rounding = I.bind(weight * qq - q * q), I.bind(weight * qq * splat(1e-6, LANES))
            # Without a spread all codes are the same.
            scale = I.bind(I.Select(spread > rounding, (weight * qx - q * x) / spread, zero))
            minimum = I.bind((x - scale * q) / weight)
            gain = I.bind(scale * qx + minimum * x)
            for i, fitted in enumerate((scale, minimum)):
                best[i] = I.Select(gain > won[0], fitted, best[i])
                line[i] = I.Select(spread > rounding, fitted, line[i])
            won[0] = I.max(won[0], gain)
    return best


def _add_up(values: Buffer, weights: Buffer, size: int, top: int, line: Registers, sums: Registers) -> None:
    """Emit sums = the weighted ones of q, q^2, x, q x and 1 for the nearest codes q on a line."""
    inverse = I.bind(splat(1.0, LANES) / line[0])
    for i in range(5):
        sums[i] = splat(0.0, LANES)
    with I.serial(size) as e:
        x = I.bind(read(values, (e, 0), LANES))
        level = I.nearbyint((x - line[1]) * inverse)
        q = I.bind(I.min(I.max(level, splat(0.0, LANES)), splat(float(top), LANES)))
        weight = I.bind(read(weights, (e, 0), LANES))
        scaled = I.bind(q * weight)
        for i, term in enumerate((scaled, scaled * q, x * weight, scaled * x, weight)):
            sums[i] = sums[i] + term


def nearest_codes(size: int, bits: int) -> tirx.PrimFunc:
    """x f32[groups, size], scales and minima f32[groups] -> codes u8[groups, size]; those of scale 0 are 0."""
    groups = tirx.Var("groups", "int64")
    arguments = {
        "x": Tensor((groups, size), "float32"),
        "scales": Tensor((groups,), "float32"),
        "minima": Tensor((groups,), "float32"),
        "codes": Tensor((groups, size), "uint8"),
    }

    def body(x: Buffer, scales: Buffer, minima: Buffer, codes: Buffer) -> None:
        with I.parallel(groups) as g:
            scale = scales[g]
            inverse = I.bind(I.Select(scale == I.float32(0), I.float32(0), I.float32(1) / scale))
            with I.serial(size // LANES) as v:
                level = I.nearbyint((read(x, (g, v * LANES), LANES) - splat(minima[g], LANES)) * splat(inverse, LANES))
                level = I.min(I.max(level, splat(0.0, LANES)), splat(float((1 << bits) - 1), LANES))
                store(codes, (g, v * LANES), I.cast(I.cast(level, f"int32x{LANES}"), f"uint8x{LANES}"), LANES)

    return function("nearest_codes", arguments, body)
