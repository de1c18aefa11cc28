"""Quantization of groups with the scales of least error, 16 groups at a time: one group in each lane of a vector.

Of a group x the stored scale s and levels q minimize sum(h (x - s q)^2), where h is the importance of each column. For
given levels the best scale is sum(h x q) / sum(h q^2), and what it wins is sum(h x q)^2 / sum(h q^2). So the levels of
a few scales around x[i] / top, where |x[i]| is the largest, are tried, and the best scale of the best levels is stored.
Its sign is the one that turns x[i] to the side that has a level more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.cpu.vectors import Registers, load, read, splat, store

LANES = 16
SPAN = 64  # blocks of 16 groups that a thread takes at a time
# Scales that are tried, in steps of 2.5 % of x[i] / top. Three times as many win 0.02 % of normal numbers' error.
_TRIED, _STEP = 19, 0.025


@dataclass(frozen=True)
class Levels:
    """Codes 0 .. 2^bits - 1 mean code - zero_point, at most `top`; `codes_per_word` of them fill a uint32.

    `group_size` of them share a scale of `dtype`, whose magnitude is at most `largest`.
    """

    bits: int
    zero_point: int
    group_size: int
    codes_per_word: int
    dtype: str
    largest: float

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1 - self.zero_point


def scale_search(levels: Levels) -> tirx.PrimFunc:
    """x f32[groups, size], importance f32[c, size] -> words u32[groups, size / codes_per_word], scales[groups].

    Row i mod c of `importance` is that of group i. Scales are in `levels.dtype`.
    """
    groups, columns = tirx.Var("groups", "int64"), tirx.Var("columns", "int64")
    size = levels.group_size
    arguments = {
        "x": Tensor((groups, size), "float32"),
        "importance": Tensor((columns, size), "float32"),
        "words": Tensor((groups, size // levels.codes_per_word), "uint32"),
        "scales": Tensor((groups,), levels.dtype),
    }

    def body(x: Buffer, importance: Buffer, words: Buffer, scales: Buffer) -> None:
        def block(values: Buffer, weights: Buffer, group_of: Callable[[Expr], Expr]) -> None:
            peak = _normalize(values, size)
            scale = _stored(_best_scale(values, weights, levels) * peak, levels)
            codes = _codes(values, peak, scale, levels)
            with I.serial(LANES) as lane:
                put(scales, group_of(lane), scale[lane])
                with I.serial(size // levels.codes_per_word) as w:
                    put(words, (group_of(lane), w), codes[w, lane])

        for_blocks(x, importance, block)

    return function("scale_search", arguments, body)


def for_blocks(x: Buffer, importance: Buffer, emit: Callable[[Buffer, Buffer, Callable[[Expr], Expr]], None]) -> None:
    """Emit `emit(values, weights, group_of)` for every LANES groups, in parallel.

    values and weights f32[size, LANES], of x and `importance`, are scratch; the last lanes of the last block repeat its
    last group.
    """
    (groups, size), columns = x.shape, importance.shape[0]
    blocks = (groups + LANES - 1) // LANES
    with I.parallel((blocks + SPAN - 1) // SPAN) as span:
        values, weights = (I.alloc_buffer((size, LANES), "float32") for _ in range(2))
        with I.serial(I.min(SPAN, blocks - span * SPAN)) as i:
            first = (span * SPAN + i) * LANES

            def group_of(lane: Expr, first: Expr = first) -> Expr:
                return I.min(first + lane, groups - 1)

            with I.serial(LANES) as lane, I.serial(size) as e:
                put(values, (e, lane), x[group_of(lane), e])
                put(weights, (e, lane), importance[group_of(lane) % columns, e])
            emit(values, weights, group_of)


def _normalize(values: Buffer, size: int) -> Expr:
    """Emit values[:, lane] /= the one of largest magnitude -> those, 1 for a group of zeros."""
    peak, zero = Registers(1, LANES), splat(0.0, LANES)
    peak[0] = zero
    with I.serial(size) as e:
        x = read(values, (e, 0), LANES)
        peak[0] = I.Select(I.abs(x) > I.abs(peak[0]), x, peak[0])
    peak[0] = I.Select(peak[0] == zero, splat(1.0, LANES), peak[0])
    with I.serial(size) as e:
        store(values, (e, 0), read(values, (e, 0), LANES) / peak[0], LANES)
    return peak[0]


def _level(value: Expr, levels: Levels) -> Expr:
    """The nearest level to a number in steps of the scale, as float32."""
    low, high = splat(float(-levels.zero_point), LANES), splat(float(levels.top), LANES)
    return I.min(I.max(I.nearbyint(value), low), high)


def _best_scale(values: Buffer, weights: Buffer, levels: Levels) -> Expr:
    """Emit the search in normalized values -> the scales."""
    best, scale, sums = Registers(1, LANES), Registers(1, LANES), Registers(2, LANES)
    zero = splat(0.0, LANES)
    best[0], scale[0] = zero, zero
    with I.serial(_TRIED) as t:
        factor = I.float32(1) + I.cast(t - _TRIED // 2, "float32") * I.float32(_STEP)
        inverse = I.bind(splat(factor * I.float32(levels.top), LANES))
        sums[0], sums[1] = zero, zero
        with I.serial(levels.group_size) as e:
            x = I.bind(read(values, (e, 0), LANES))
            level = I.bind(_level(x * inverse, levels))
            weighted = I.bind(level * read(weights, (e, 0), LANES))
            sums[0] = sums[0] + weighted * x
            sums[1] = sums[1] + weighted * level
        fitted = I.bind(I.Select(sums[1] > zero, sums[0] / sums[1], zero))
        won = I.bind(fitted * sums[0])
        scale[0] = I.Select(won > best[0], fitted, scale[0])
        best[0] = I.max(best[0], won)
    return scale[0]


def _stored(scale: Expr, levels: Levels) -> Buffer:
    """Emit the scales in the dtype that they are stored in."""
    limit, stored = splat(levels.largest, LANES), I.alloc_buffer((LANES,), levels.dtype)
    store(stored, 0, I.cast(I.min(I.max(scale, -limit), limit), f"{levels.dtype}x{LANES}"), LANES)
    return stored


def _codes(values: Buffer, peak: Expr, scale: Buffer, levels: Levels) -> Buffer:
    """Emit the nearest codes for stored scales -> words u32[words of a group, LANES]; scale 0 gives those of 0."""
    size, each = levels.group_size, levels.codes_per_word
    words, zero = I.alloc_buffer((size // each, LANES), "uint32"), splat(0.0, LANES)
    step = I.bind(load(scale, 0, LANES))
    inverse = I.bind(I.Select(step == zero, zero, peak / step))
    with I.serial(size // each) as w:
        store(words, (w, 0), splat(I.uint32(0), LANES), LANES)
        with I.serial(each) as j:
            level = I.cast(_level(read(values, (w * each + j, 0), LANES) * inverse, levels), f"int32x{LANES}")
            code = I.cast(level + splat(I.int32(levels.zero_point), LANES), f"uint32x{LANES}")
            code = I.shift_left(code, splat(I.cast(j * levels.bits, "uint32"), LANES))
            store(words, (w, 0), I.bitwise_or(read(words, (w, 0), LANES), code), LANES)
    return words
