"""The draw of a token from a list of candidates without sorting it.

The bits of positive float32 numbers have the order of the numbers, so a search finds limits digit by digit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, put
from tir_schedules.gpu.kernel import barrier, ceildiv, keep, local, reduced, shared

DRAW_THREADS = 256
_DIGIT_BITS = 4
_DIGITS = 1 << _DIGIT_BITS
_WEIGHT_BITS = 32  # the first two are 0: weights are at most 1
# exp clips its argument at -87 on CPUs, so there this weight stands for any smaller one, including 0.
_MIN_WEIGHT = 2e-38


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be drawn, in order of ids, with weights; `size` of them, and the vocabulary's `total` weight."""

    weights: Buffer
    tokens: Buffer
    size: Buffer
    total: Buffer


def each_below(count: Expr, threads: int, tx: Expr, do: Callable[[Expr], None]) -> None:
    """do(i) for every i below `count`; neighbouring invocations take neighbouring i."""
    with I.serial(0, ceildiv(count, threads)) as step:
        at = keep(step * threads + tx)
        with I.If(at < count), I.Then():
            do(at)


def bits_of(weight: Expr) -> Expr:
    return I.reinterpret("uint32", weight)


def weight_of(bits: Expr) -> Expr:
    return I.reinterpret("float32", bits)


def plus(a: Expr, b: Expr) -> Expr:
    return a + b


def sum_before(numbers: Buffer, tx: Expr, own: Expr) -> Expr:
    """The sum of `own` over the invocations before this one. `numbers` is shared, one for each invocation."""
    total = local(1, str(numbers.dtype))
    barrier()
    put(numbers, tx, own)
    barrier()
    put(total, 0, 0)
    with I.serial(0, tx) as t:
        add(total, 0, numbers[t])
    return total[0]


class Draw:
    """The draw from a list, by one workgroup.

    A prefix of the list in order of weight and id is described by bits[0], the limit, and ties[0]: all weights above
    the limit, and the first ties[0] of those equal to it.
    """

    def __init__(self, candidates: Candidates, row: Expr, tx: Expr) -> None:
        self.list, self.row, self.tx = candidates, row, tx
        self.count = keep(candidates.size[row])
        self.scratch = shared(DRAW_THREADS + 16)
        self.own = shared(_DIGITS * DRAW_THREADS)
        self.bits = shared(2, "uint32")  # the limit; the result of a search
        self.ties = shared(1, "int32")
        self.above = shared(1)  # result of a search: the sum of larger weights

    def run(self, top_k: Expr, top_p: Expr, min_p: Expr, uniform: Expr, token: Buffer) -> None:
        """token[row] = the drawn token."""
        tx, total = self.tx, local(1)
        put(total, 0, self.list.total[self.row])
        with I.If(tx == 0), I.Then():
            put(self.bits, 0, I.uint32(0))
            put(self.ties, 0, self.count)
        barrier()
        with I.If(top_k > 0), I.Then():
            self._search(lambda weight: I.float32(1), f32(I.min(top_k, self.count)), strict=False)
            self._shorten(I.min(top_k, self.count) - I.cast(self.above[0], "int32"))
            put(total, 0, self._mass())
        with I.If(top_p < 1), I.Then():
            goal = keep(top_p * total[0])
            self._search(lambda weight: weight, goal, strict=False)
            missing = (goal - self.above[0]) / weight_of(self.bits[1])
            self._shorten(I.max(I.cast(I.ceil(I.min(missing, I.float32(1 << 24))), "int32"), 1))
        smallest = keep(bits_of(I.max(min_p, I.float32(_MIN_WEIGHT))))
        with I.If(I.And(tx == 0, smallest > self.bits[0])), I.Then():
            put(self.bits, 0, smallest - I.uint32(1))
            put(self.ties, 0, 0)
        barrier()
        goal = keep(uniform * self._mass())
        with I.If(I.Or(top_k > 0, top_p < 1)):
            with I.Then():
                self._draw_by_weight(goal, token)
            with I.Else():
                above = lambda weight: bits_of(weight) > self.bits[0]  # noqa: E731
                self._draw_by_id(lambda weight: I.if_then_else(above(weight), weight, I.float32(0)), goal, token)

    def _each(self, do: Callable[[Expr], None]) -> None:
        """do(weight) for the whole list, in any order."""

        def load(at: Expr) -> None:
            weight = local(1)
            put(weight, 0, self.list.weights[self.row, at])
            do(weight[0])

        each_below(self.count, DRAW_THREADS, self.tx, load)

    def _sum(self, value: Callable[[Expr], Expr]) -> Expr:
        """The sum of value(weight) over the list, for every invocation."""
        own_sum = local(1)
        put(own_sum, 0, 0.0)
        self._each(lambda weight: add(own_sum, 0, value(weight)))
        return keep(reduced(self.scratch, self.tx, DRAW_THREADS, own_sum[0], plus))

    def _equal(self) -> Expr:
        """The number of weights equal to the limit."""
        return self._sum(lambda weight: I.if_then_else(bits_of(weight) == self.bits[0], I.float32(1), I.float32(0)))

    def _mass(self) -> Expr:
        """The sum of the prefix."""
        above = self._sum(lambda weight: I.if_then_else(bits_of(weight) > self.bits[0], weight, I.float32(0)))
        ties = I.min(f32(self.ties[0]), self._equal())
        return above + ties * weight_of(self.bits[0])

    def _shorten(self, ties: Expr) -> None:
        """End the prefix at the result of a search with `ties` of its equals, unless it ends earlier."""
        with I.If(self.tx == 0), I.Then(), I.If(self.bits[1] > self.bits[0]):
            with I.Then():
                put(self.bits, 0, self.bits[1])
                put(self.ties, 0, ties)
            with I.Else(), I.If(self.bits[1] == self.bits[0]), I.Then():
                put(self.ties, 0, I.min(self.ties[0], ties))
        barrier()

    def _search(self, value: Callable[[Expr], Expr], goal: Expr, *, strict: bool) -> None:
        """Set bits[1] to the largest weight w so that the values of all weights >= w reach `goal` (`strict`: exceed).

        If all values together do not, w is the smallest weight with a value. Sets above[0] to the sum above w.
        """
        own, tx = self.own, self.tx
        parts = DRAW_THREADS // _DIGITS
        barrier()
        with I.If(tx == 0), I.Then():
            put(self.bits, 1, I.uint32(0))
            put(self.above, 0, 0.0)
        barrier()
        with I.serial(0, _WEIGHT_BITS // _DIGIT_BITS) as step:
            shift = keep(I.cast(_WEIGHT_BITS - _DIGIT_BITS - step * _DIGIT_BITS, "uint32"))
            high = keep(self.bits[1])
            with I.serial(0, _DIGITS) as digit:
                put(own, digit * DRAW_THREADS + tx, 0.0)

            def count(weight: Expr, shift: Expr = shift, high: Expr = high) -> None:
                seen = keep(I.shift_right(bits_of(weight), shift))
                with I.If(I.shift_right(seen, I.uint32(_DIGIT_BITS)) == high), I.Then():
                    digit = I.cast(I.bitwise_and(seen, I.uint32(_DIGITS - 1)), "int32")
                    add(own, digit * DRAW_THREADS + tx, value(weight))

            self._each(count)
            barrier()
            own_sum = local(1)
            put(own_sum, 0, 0.0)
            with I.serial(0, _DIGITS) as i:
                add(own_sum, 0, own[tx // parts * DRAW_THREADS + i * parts + tx % parts])
            put(self.scratch, tx, own_sum[0])
            barrier()
            with I.If(tx < _DIGITS), I.Then():
                put(own_sum, 0, 0.0)
                with I.serial(0, parts) as i:
                    add(own_sum, 0, self.scratch[tx * parts + i])
                put(own, tx, own_sum[0])
            barrier()
            with I.If(tx == 0), I.Then():
                self._choose(goal, high, strict=strict)
            barrier()

    def _choose(self, goal: Expr, high: Expr, *, strict: bool) -> None:
        """Append a digit to bits[1], from the sums of digits in `own`; by one invocation."""
        running, below, digit, done = local(1), local(1), local(1, "int32"), local(1, "int32")
        put(running, 0, self.above[0])
        put(digit, 0, 0)
        put(done, 0, 0)
        with I.serial(0, _DIGITS) as i:
            sum_ = keep(self.own[_DIGITS - 1 - i])
            with I.If(I.And(done[0] == 0, sum_ > 0)), I.Then():
                put(below, 0, running[0])
                put(digit, 0, _DIGITS - 1 - i)
                add(running, 0, sum_)
                put(done, 0, I.cast(running[0] > goal if strict else running[0] >= goal, "int32"))
        put(self.above, 0, below[0])
        put(self.bits, 1, I.bitwise_or(I.shift_left(high, I.uint32(_DIGIT_BITS)), I.cast(digit[0], "uint32")))

    def _draw_by_weight(self, goal: Expr, token: Buffer) -> None:
        """Draw the token of the prefix at which the sum of weights, largest first, passes `goal`."""
        share = keep(I.min(f32(self.ties[0]) / I.max(self._equal(), I.float32(1)), I.float32(1)))

        def value(weight: Expr) -> Expr:
            equal = I.if_then_else(bits_of(weight) == self.bits[0], weight * share, I.float32(0))
            return I.if_then_else(bits_of(weight) > self.bits[0], weight, equal)

        self._search(value, goal, strict=True)
        limit = keep(self.bits[1])
        rank = I.floor((goal - self.above[0]) / weight_of(limit))
        last = I.if_then_else(limit == self.bits[0], f32(self.ties[0] - 1), I.float32(1 << 24))
        rank = keep(I.max(I.min(rank, last), I.float32(0)))
        drawn = lambda weight: I.And(bits_of(weight) == limit, weight > I.float32(0))  # noqa: E731
        self._draw_by_id(lambda weight: I.if_then_else(drawn(weight), I.float32(1), I.float32(0)), rank, token)

    def _draw_by_id(self, value: Callable[[Expr], Expr], goal: Expr, token: Buffer) -> None:
        """Draw the token at which the sum of values, by id, passes `goal`, or the last with a value, or -1."""
        tx, weights, scratch = self.tx, self.list.weights, self.scratch
        share = keep(ceildiv(self.count, DRAW_THREADS))
        own_sum, running, chosen = local(1), local(1), local(1, "int32")

        def each(do: Callable[[Expr, Expr], None]) -> None:
            with I.serial(0, share) as i:
                at = keep(tx * share + i)
                with I.If(at < self.count), I.Then():
                    number = local(1)
                    put(number, 0, value(weights[self.row, at]))
                    with I.If(number[0] > 0), I.Then():
                        do(at, number[0])

        put(own_sum, 0, 0.0)
        each(lambda at, number: add(own_sum, 0, number))
        put(running, 0, sum_before(scratch, tx, own_sum[0]))
        none = I.float32(DRAW_THREADS)
        passes = I.And(own_sum[0] > 0, running[0] + own_sum[0] > goal)
        first = keep(reduced(scratch, tx, DRAW_THREADS, I.if_then_else(passes, f32(tx), none), I.min))
        last = keep(reduced(scratch, tx, DRAW_THREADS, I.if_then_else(own_sum[0] > 0, f32(tx), I.float32(0)), I.max))
        with I.If(f32(tx) == I.if_then_else(first < none, first, last)), I.Then():
            put(chosen, 0, -1)

            def walk(at: Expr, number: Expr) -> None:
                with I.If(I.Or(chosen[0] < 0, running[0] <= goal)), I.Then():
                    add(running, 0, number)
                    put(chosen, 0, at)

            each(walk)
            drawn = self.list.tokens[self.row, I.max(chosen[0], 0)]
            put(token, self.row, I.if_then_else(chosen[0] < 0, -1, drawn))
