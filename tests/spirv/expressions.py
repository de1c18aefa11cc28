"""Random expressions of integers, booleans and whole floats, each with what numpy says: no operation leaves its dtype.

An expression knows bounds of its numbers, and what could overflow is made smaller first: TVM takes for granted that
nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tests.spirv.harness import Array
from tir_schedules.gpu.kernel import keep

Numbers = Callable[[Sequence[Array]], Array]  # of the inputs: int64[n]
DTYPES = ("int32", "uint32", "int64", "int8", "uint8", "int16", "float32")
_WHOLE = 1 << 23  # float32 has the integers up to twice this


@dataclass(frozen=True)
class Node:
    """An expression of TVM, its numbers, and bounds of them."""

    expr: Any
    numbers: Numbers
    dtype: str
    low: int
    high: int


def limits(dtype: str) -> tuple[int, int]:
    """The numbers of a dtype that expressions have."""
    if dtype == "float32":
        return -_WHOLE, _WHOLE
    info = np.iinfo(dtype)
    return int(info.min), int(info.max)


def inputs(size: int, seed: int) -> list[Array]:
    """A vector of each of DTYPES, with numbers of all sizes."""
    rng = np.random.default_rng(seed)
    found = []
    for dtype in DTYPES:
        low, high = limits(dtype)
        shifts = rng.integers(0, high.bit_length(), size)
        found.append((rng.integers(low, high, size, np.int64, endpoint=True) >> shifts).astype(dtype))
    return found


class Generator:
    """Expressions at `index` of `inputs`, all of the same seed."""

    def __init__(self, seed: int, inputs: Sequence[Any], index: Any, size: int, vectors: bool) -> None:
        self._rng = np.random.default_rng(seed)
        self._inputs = inputs
        self._index = index
        self._size = size
        self._vectors = vectors

    def expression(self, dtype: str, depth: int) -> Node:
        """A random expression of a dtype."""
        if depth == 0:
            return self._leaf(dtype)
        makers = [self._arithmetic, self._arithmetic, self._extreme, self._choice, self._converted, self._named]
        if dtype != "float32":
            makers += [self._quotient, self._quotient, self._bits, self._shift]
        return makers[self._rng.integers(len(makers))](dtype, depth - 1)

    # Leaves

    def _leaf(self, dtype: str) -> Node:
        kind = self._rng.integers(4)
        low, high = limits(dtype)
        if kind == 0:
            value = int(self._rng.integers(low, high, dtype=np.int64, endpoint=True)) >> int(
                self._rng.integers(high.bit_length())
            )
            return Node(tirx.const(value, dtype), lambda x: np.full(self._size, value), dtype, value, value)
        if kind == 1 and high >= self._size:
            return Node(self._index.astype(dtype), lambda x: np.arange(self._size), dtype, 0, self._size - 1)
        if kind == 2:
            which = DTYPES.index(dtype)
            at = self.expression("int32", 1)
            where = tirx.floormod(at.expr, tirx.const(self._size, "int32"))
            return Node(
                self._inputs[which][where],
                lambda x: x[which].astype(np.int64)[at.numbers(x) % self._size],
                dtype,
                low,
                high,
            )
        return self._load(dtype)

    def _load(self, dtype: str) -> Node:
        which = DTYPES.index(dtype)
        return Node(self._inputs[which][self._index], lambda x: x[which].astype(np.int64), dtype, *limits(dtype))

    def _smaller(self, node: Node, limit: int) -> Node:
        """The same numbers where they are at most `limit`, else what is left of them."""
        if -limit <= node.low and node.high <= limit:
            return node
        limit = min(limit, limits(node.dtype)[1] - 1)
        low, high = max(min(node.low, 0), -limit), min(max(node.high, 0), limit)
        if node.dtype == "float32":
            one = Node(node.expr.astype("int32"), node.numbers, "int32", node.low, node.high)
            found = self._smaller(one, limit)
            return Node(found.expr.astype("float32"), found.numbers, "float32", found.low, found.high)
        rest = tirx.truncmod(node.expr, tirx.const(limit + 1, node.dtype))
        return Node(rest, lambda x: np.fmod(node.numbers(x), limit + 1), node.dtype, low, high)

    def _pair(self, dtype: str, depth: int, limit: int) -> tuple[Node, Node]:
        return (
            self._smaller(self.expression(dtype, depth), limit),
            self._smaller(self.expression(dtype, depth), limit),
        )

    # Operators

    def _arithmetic(self, dtype: str, depth: int) -> Node:
        lowest, top = limits(dtype)
        name = ("add", "mul", "sub")[self._rng.integers(3 if lowest else 2)]  # TVM folds 0 - 1 of uint as an error
        limit = int(top**0.5) - 1 if name == "mul" else top // 2
        a, b = self._pair(dtype, depth, limit)
        if name == "add":
            return Node(a.expr + b.expr, lambda x: a.numbers(x) + b.numbers(x), dtype, a.low + b.low, a.high + b.high)
        if name == "sub":
            return Node(a.expr - b.expr, lambda x: a.numbers(x) - b.numbers(x), dtype, a.low - b.high, a.high - b.low)
        corners = [p * q for p in (a.low, a.high) for q in (b.low, b.high)]
        return Node(a.expr * b.expr, lambda x: a.numbers(x) * b.numbers(x), dtype, min(corners), max(corners))

    def _quotient(self, dtype: str, depth: int) -> Node:
        """Floor and truncating quotients and rests; the divisor is odd, so not 0."""
        top = limits(dtype)[1]
        a, b = self._pair(dtype, depth, top - 1)
        divisor, by = b.expr | tirx.const(1, dtype), lambda x: b.numbers(x) | 1
        size = max(-a.low, a.high)
        most = max(-b.low, b.high) + 1
        low = -1 if a.low < 0 or b.low < 0 else 0
        kind = self._rng.integers(4)
        if kind == 0:
            return Node(tirx.floordiv(a.expr, divisor), lambda x: a.numbers(x) // by(x), dtype, low * size, size)
        if kind == 1:
            return Node(tirx.floormod(a.expr, divisor), lambda x: a.numbers(x) % by(x), dtype, low * most, most)
        if kind == 2:
            return Node(
                tirx.truncdiv(a.expr, divisor), lambda x: _truncated(a.numbers(x), by(x)), dtype, low * size, size
            )
        return Node(tirx.truncmod(a.expr, divisor), lambda x: np.fmod(a.numbers(x), by(x)), dtype, low * size, size)

    def _bits(self, dtype: str, depth: int) -> Node:
        low, high = limits(dtype)
        a, b = self.expression(dtype, depth), self.expression(dtype, depth)
        kind = self._rng.integers(4)
        if kind == 3:
            return Node(~a.expr, lambda x: _wrapped(~a.numbers(x), dtype), dtype, low, high)
        operation = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)[kind]
        expr = (a.expr & b.expr, a.expr | b.expr, a.expr ^ b.expr)[kind]
        return Node(expr, lambda x: operation(a.numbers(x), b.numbers(x)), dtype, low, high)

    def _shift(self, dtype: str, depth: int) -> Node:
        a, b = self.expression(dtype, depth), self.expression(dtype, depth)
        bits = np.dtype(dtype).itemsize * 8
        if self._rng.integers(2):
            most = tirx.const(bits - 1, dtype)
            return Node(
                a.expr >> (b.expr & most),
                lambda x: a.numbers(x) >> (b.numbers(x) & (bits - 1)),
                dtype,
                min(a.low, 0),
                max(a.high, 0),
            )
        by = int(self._rng.integers(bits - 1))
        a = self._smaller(a, limits(dtype)[1] >> by)
        return Node(a.expr << tirx.const(by, dtype), lambda x: a.numbers(x) << by, dtype, a.low << by, a.high << by)

    def _extreme(self, dtype: str, depth: int) -> Node:
        a, b = self.expression(dtype, depth), self.expression(dtype, depth)
        if self._rng.integers(2):
            low, high = min(a.low, b.low), min(a.high, b.high)
            return Node(tirx.min(a.expr, b.expr), lambda x: np.minimum(a.numbers(x), b.numbers(x)), dtype, low, high)
        low, high = max(a.low, b.low), max(a.high, b.high)
        return Node(tirx.max(a.expr, b.expr), lambda x: np.maximum(a.numbers(x), b.numbers(x)), dtype, low, high)

    def _choice(self, dtype: str, depth: int) -> Node:
        test, of = self._condition(depth)
        a, b = self.expression(dtype, depth), self.expression(dtype, depth)
        make = tirx.Select if self._rng.integers(2) else tirx.if_then_else
        low, high = min(a.low, b.low), max(a.high, b.high)
        return Node(make(test, a.expr, b.expr), lambda x: np.where(of(x), a.numbers(x), b.numbers(x)), dtype, low, high)

    def _condition(self, depth: int) -> tuple[Any, Numbers]:
        kind = self._rng.integers(5)
        if depth and kind < 3:
            (p, of_p), (q, of_q) = self._condition(depth - 1), self._condition(depth - 1)
            if kind == 0:
                return tirx.And(p, q), lambda x: of_p(x) & of_q(x)
            if kind == 1:
                return tirx.Or(p, q), lambda x: of_p(x) | of_q(x)
            return tirx.Not(p), lambda x: ~of_p(x)
        dtype = DTYPES[self._rng.integers(len(DTYPES))]
        a, b = self.expression(dtype, depth), self.expression(dtype, depth)
        if kind == 3:  # of a load: TVM folds numbers, and refuses 2 as a bool
            which = DTYPES.index(dtype)
            return self._inputs[which][self._index].astype("bool"), lambda x: x[which] != 0
        which = self._rng.integers(4)
        expr = (a.expr < b.expr, a.expr <= b.expr, a.expr.equal(b.expr), a.expr != b.expr)[which]
        compare = (np.less, np.less_equal, np.equal, np.not_equal)[which]
        return expr, lambda x: compare(a.numbers(x), b.numbers(x))

    def _converted(self, dtype: str, depth: int) -> Node:
        """From another dtype; integers that a buffer holds are cut, others made to fit."""
        come = DTYPES[self._rng.integers(len(DTYPES))]
        a = self.expression(come, depth)
        low, high = limits(dtype)
        if self._rng.integers(3) == 0:  # TVM folds numbers, and refuses those beyond the dtype, but not of loads
            a = self._load(come)
        elif come != "float32" and dtype != "float32":
            a = self._smaller(a, high)
            if low == 0 and a.low < 0:
                a = Node(
                    tirx.max(a.expr, tirx.const(0, come)), lambda x, a=a: np.maximum(a.numbers(x), 0), come, 0, a.high
                )  # type: ignore[misc]
        if dtype == "float32":
            a = self._smaller(a, _WHOLE)
        elif come == "float32" and np.dtype(dtype).itemsize < 4:
            a = self._smaller(a, high)
        if come == "float32" and low == 0:
            a = Node(tirx.max(a.expr, tirx.const(0, come)), lambda x, a=a: np.maximum(a.numbers(x), 0), come, 0, a.high)  # type: ignore[misc]
        cut = dtype != "float32" and (a.low < low or a.high > high)
        bounds = (low, high) if cut else (a.low, a.high)
        return Node(a.expr.astype(dtype), lambda x: _wrapped(a.numbers(x), dtype), dtype, *bounds)

    def _named(self, dtype: str, depth: int) -> Node:
        """A statement names the value, unless it is in vectors, which TVM cannot."""
        a = self.expression(dtype, depth)
        return a if self._vectors else Node(keep(a.expr), a.numbers, dtype, a.low, a.high)


def _truncated(a: Array, b: Array) -> Array:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _wrapped(numbers: Array, dtype: str) -> Array:
    return numbers if dtype == "float32" else numbers.astype(dtype).astype(np.int64)
