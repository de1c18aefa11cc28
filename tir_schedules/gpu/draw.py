"""The draw of a token from a list of candidates, without sorting it: what sorting would tell is found digit by digit.

The bits of a positive float32 order as the number does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import Buffer, Expr, add, barrier, ceildiv, f32, keep, local, put, reduced, shared

DRAW_THREADS = 256
_DIGIT_BITS = 4
_DIGITS = 1 << _DIGIT_BITS
_WEIGHT_BITS = 32  # of which the first two are 0: weights are at most 1
# exp clips its argument at -87 on CPUs, so that a weight this small stands for any smaller one there, 0 included.
_CLIPPED = 2e-38


@dataclass(frozen=True)
class Candidates:
    """Tokens that may be drawn, by id, with their weights; how many, and the weight of the whole vocabulary."""

    weights: Buffer
    tokens: Buffer
    size: Buffer
    total: Buffer


def each_below(count: Expr, threads: int, tx: Expr, do: Callable[[Expr], None]) -> None:
    """do(i) for every i below `count`, neighbours by neighbouring invocations."""
    with I.serial(0, ceildiv(count, threads)) as turn:
        at = keep(turn * threads + tx)
        with I.If(at < count), I.Then():
            do(at)


def bits_of(weight: Expr) -> Expr:
    return I.reinterpret("uint32", weight)


def weight_of(bits: Expr) -> Expr:
    return I.reinterpret("float32", bits)


def plus(a: Expr, b: Expr) -> Expr:
    return a + b


def sum_before(numbers: Buffer, tx: Expr, mine: Expr) -> Expr:
    """The sum of `mine` of the invocations before this one. `numbers`: shared, one each."""
    total = local(1, str(numbers.dtype))
    barrier()
    put(numbers, tx, mine)
    barrier()
    put(total, 0, 0)
    with I.serial(0, tx) as t:
        add(total, 0, numbers[t])
    return total[0]


class Draw:
    """The draw from a list, by one workgroup.

    A prefix of the list, sorted by weight and then by id, is a `limit` and a number of `ties`: the weights above the
    limit, and the first `ties` of those that are equal to it.
    """

    def __init__(self, found: Candidates, row: Expr, tx: Expr) -> None:
        self.list, self.row, self.tx = found, row, tx
        self.count = keep(found.size[row])
        self.scratch = shared(DRAW_THREADS + 16)
        self.own = shared(_DIGITS * DRAW_THREADS)
        self.bits = shared(2, "uint32")  # the limit; what a search has found
        self.ties = shared(1, "int32")
        self.above = shared(1)  # what a search has found: the sum of what is larger

    def run(self, top_k: Expr, top_p: Expr, min_p: Expr, uniform: Expr, token: Buffer) -> None:
        """token[row] = the drawn one."""
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
            wanted = keep(top_p * total[0])
            self._search(lambda weight: weight, wanted, strict=False)
            missing = (wanted - self.above[0]) / weight_of(self.bits[1])
            self._shorten(I.max(I.cast(I.ceil(I.min(missing, I.float32(1 << 24))), "int32"), 1))
        smallest = keep(bits_of(I.max(min_p, I.float32(_CLIPPED))))
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
        """do(weight) for all of the list, in no order."""

        def load(at: Expr) -> None:
            weight = local(1)
            put(weight, 0, self.list.weights[self.row, at])
            do(weight[0])

        each_below(self.count, DRAW_THREADS, self.tx, load)

    def _sum(self, value: Callable[[Expr], Expr]) -> Expr:
        """The sum of value(weight) over the list, for every invocation."""
        mine = local(1)
        put(mine, 0, 0.0)
        self._each(lambda weight: add(mine, 0, value(weight)))
        return keep(reduced(self.scratch, self.tx, DRAW_THREADS, mine[0], plus))

    def _equal(self) -> Expr:
        """How many weights are equal to the limit."""
        return self._sum(lambda weight: I.if_then_else(bits_of(weight) == self.bits[0], I.float32(1), I.float32(0)))

    def _mass(self) -> Expr:
        """The sum of the prefix."""
        above = self._sum(lambda weight: I.if_then_else(bits_of(weight) > self.bits[0], weight, I.float32(0)))
        ties = I.min(f32(self.ties[0]), self._equal())
        return above + ties * weight_of(self.bits[0])

    def _shorten(self, ties: Expr) -> None:
        """The prefix ends at what the search found, with so many of its equals, unless it ended before."""
        with I.If(self.tx == 0), I.Then(), I.If(self.bits[1] > self.bits[0]):
            with I.Then():
                put(self.bits, 0, self.bits[1])
                put(self.ties, 0, ties)
            with I.Else(), I.If(self.bits[1] == self.bits[0]), I.Then():
                put(self.ties, 0, I.min(self.ties[0], ties))
        barrier()

    def _search(self, value: Callable[[Expr], Expr], wanted: Expr, *, strict: bool) -> None:
        """bits[1]: the largest weight such that the values of it and what is larger sum up to `wanted` (`strict`: to
        more), or the smallest with a value where all do not; above[0]: the sum of what is larger than it."""
        own, tx = self.own, self.tx
        parts = DRAW_THREADS // _DIGITS
        barrier()
        with I.If(tx == 0), I.Then():
            put(self.bits, 1, I.uint32(0))
            put(self.above, 0, 0.0)
        barrier()
        with I.serial(0, _WEIGHT_BITS // _DIGIT_BITS) as turn:
            shift = keep(I.cast(_WEIGHT_BITS - _DIGIT_BITS - turn * _DIGIT_BITS, "uint32"))
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
            mine = local(1)
            put(mine, 0, 0.0)
            with I.serial(0, _DIGITS) as i:
                add(mine, 0, own[tx // parts * DRAW_THREADS + i * parts + tx % parts])
            put(self.scratch, tx, mine[0])
            barrier()
            with I.If(tx < _DIGITS), I.Then():
                put(mine, 0, 0.0)
                with I.serial(0, parts) as i:
                    add(mine, 0, self.scratch[tx * parts + i])
                put(own, tx, mine[0])
            barrier()
            with I.If(tx == 0), I.Then():
                self._choose(wanted, high, strict=strict)
            barrier()

    def _choose(self, wanted: Expr, high: Expr, *, strict: bool) -> None:
        """The next digit, from the sums of digits in `own`, by one invocation."""
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
                put(done, 0, I.cast(running[0] > wanted if strict else running[0] >= wanted, "int32"))
        put(self.above, 0, below[0])
        put(self.bits, 1, I.bitwise_or(I.shift_left(high, I.uint32(_DIGIT_BITS)), I.cast(digit[0], "uint32")))

    def _draw_by_weight(self, goal: Expr, token: Buffer) -> None:
        """The token of the prefix at which the sum of weights, the largest first, passes `goal`."""
        share = keep(I.min(f32(self.ties[0]) / I.max(self._equal(), I.float32(1)), I.float32(1)))

        def value(weight: Expr) -> Expr:
            equal = I.if_then_else(bits_of(weight) == self.bits[0], weight * share, I.float32(0))
            return I.if_then_else(bits_of(weight) > self.bits[0], weight, equal)

        self._search(value, goal, strict=True)
        found = keep(self.bits[1])
        rank = I.floor((goal - self.above[0]) / weight_of(found))
        last = I.if_then_else(found == self.bits[0], f32(self.ties[0] - 1), I.float32(1 << 24))
        rank = keep(I.max(I.min(rank, last), I.float32(0)))
        self._draw_by_id(
            lambda weight: I.if_then_else(bits_of(weight) == found, I.float32(1), I.float32(0)), rank, token
        )

    def _draw_by_id(self, value: Callable[[Expr], Expr], goal: Expr, token: Buffer) -> None:
        """The token at which the sum of values, by id, passes `goal`, else the last one with a value."""
        tx, weights, scratch = self.tx, self.list.weights, self.scratch
        share = keep(ceildiv(self.count, DRAW_THREADS))
        mine, running, chosen = local(1), local(1), local(1, "int32")

        def each(do: Callable[[Expr, Expr], None]) -> None:
            with I.serial(0, share) as i:
                at = keep(tx * share + i)
                with I.If(at < self.count), I.Then():
                    one = local(1)
                    put(one, 0, value(weights[self.row, at]))
                    with I.If(one[0] > 0), I.Then():
                        do(at, one[0])

        put(mine, 0, 0.0)
        each(lambda at, one: add(mine, 0, one))
        put(running, 0, sum_before(scratch, tx, mine[0]))
        none = I.float32(DRAW_THREADS)
        passes = I.And(mine[0] > 0, running[0] + mine[0] > goal)
        first = keep(reduced(scratch, tx, DRAW_THREADS, I.if_then_else(passes, f32(tx), none), I.min))
        last = keep(reduced(scratch, tx, DRAW_THREADS, I.if_then_else(mine[0] > 0, f32(tx), I.float32(0)), I.max))
        with I.If(f32(tx) == I.if_then_else(first < none, first, last)), I.Then():
            put(chosen, 0, -1)

            def walk(at: Expr, one: Expr) -> None:
                with I.If(I.Or(chosen[0] < 0, running[0] <= goal)), I.Then():
                    add(running, 0, one)
                    put(chosen, 0, at)

            each(walk)
            put(token, self.row, self.list.tokens[self.row, I.max(chosen[0], 0)])
