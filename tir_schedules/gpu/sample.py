"""From logits to the next token on GPUs, as `tir_schedules/cpu/sampling.py` draws it, without sorting the vocabulary.

Four kernels: the best logit of each slice of the vocabulary; weights, and how many there are at each magnitude; the
tokens that may be drawn, in a list; the draw from it. Only the last, over what is a few tokens as a rule, runs in one
workgroup. What sorting would tell is found digit by digit of the weights' bits, which order as the weights do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import (
    Buffer,
    Expr,
    Tensor,
    add,
    barrier,
    ceildiv,
    f32,
    function,
    keep,
    launch,
    local,
    put,
    reduced,
    shared,
    workspace,
)

_THREADS = 64
_RUN = 32  # elements of a slice that an invocation takes
_SLICE = _THREADS * _RUN
_LEVELS = 32  # magnitudes of weights
_DRAW_THREADS = 256
_DIGIT_BITS = 4
_DIGITS = 1 << _DIGIT_BITS
_WEIGHT_BITS = 32  # of which the first two are 0: weights are at most 1
_LOWEST = -3.4e38
# exp clips its argument at -87 on CPUs, so that a weight this small stands for any smaller one there, 0 included.
_CLIPPED = 2e-38


def sample(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, 1, V] (left as they are), temperature, top_p, min_p, uniform f32[b], top_k i32[b] -> token i32[b].

    As transformers' warpers in order: temperature, top-k (0: off; of equal logits the lower ids), top-p over what
    is left, min-p relative to the largest. Temperature 0 takes the largest logit, the lowest id on a tie. `uniform`
    in [0, 1) draws: from the best token down where top-k or top-p is on, else by id. Sums are of float32.
    """
    b = tirx.Var("b", "int64")
    arguments = {
        "logits": Tensor((b, 1, vocab), "float32"),
        "temperature": Tensor((b,), "float32"),
        "top_p": Tensor((b,), "float32"),
        "top_k": Tensor((b,), "int32"),
        "min_p": Tensor((b,), "float32"),
        "uniform": Tensor((b,), "float32"),
        "token": Tensor((b,), "int32"),
    }
    slices = -(-vocab // _SLICE)

    def body(logits: Buffer, temperature: Buffer, *rest: Buffer) -> None:
        top_p, top_k, min_p, uniform, token = rest
        best = _Best(vocab, slices, workspace((b, slices), "float32"), workspace((b, slices), "int32"))
        weights = workspace((b, vocab), "float32")
        levels = _Levels(slices, workspace((b, slices, _LEVELS), "float32"), workspace((b, slices, _LEVELS), "int32"))
        candidates = _List(
            workspace((b, vocab), "float32"), workspace((b, vocab), "int32"), workspace((b,), "int32"),
            workspace((b,), "float32"),
        )  # fmt: skip
        with launch(_THREADS, slices, b) as (piece, row, tx):
            best.find(logits, row, piece, tx)
        with launch(_THREADS, slices, b) as (piece, row, tx), I.If(temperature[row] > 0), I.Then():
            inverse = keep(I.float32(1) / I.max(temperature[row], I.float32(1e-30)))
            levels.weigh(logits, weights, best.logit(row, tx, _THREADS), inverse, row, piece, tx)
        with launch(_THREADS, slices, b) as (piece, row, tx), I.If(temperature[row] > 0), I.Then():
            last = levels.last(top_k, top_p, candidates, row, piece, tx)
            levels.gather(weights, candidates, last, row, piece, tx)
        with launch(_DRAW_THREADS, b) as (row, _, tx), I.If(temperature[row] > 0):
            with I.Then():
                _Draw(candidates, row, tx).run(top_k[row], top_p[row], min_p[row], uniform[row], token)
            with I.Else():
                best.greedy(token, row, tx)

    return function("sample", arguments, body)


def _each(count: Expr, threads: int, tx: Expr, do: Callable[[Expr], None]) -> None:
    """do(i) for every i below `count`, neighbours by neighbouring invocations."""
    with I.serial(0, ceildiv(count, threads)) as turn:
        at = keep(turn * threads + tx)
        with I.If(at < count), I.Then():
            do(at)


def _bits(weight: Expr) -> Expr:
    return I.reinterpret("uint32", weight)


def _weight(bits: Expr) -> Expr:
    return I.reinterpret("float32", bits)


def _plus(a: Expr, b: Expr) -> Expr:
    return a + b


def _before(numbers: Buffer, tx: Expr, mine: Expr) -> Expr:
    """The sum of `mine` of the invocations before this one. `numbers`: shared, one each."""
    total = local(1, str(numbers.dtype))
    barrier()
    put(numbers, tx, mine)
    barrier()
    put(total, 0, 0)
    with I.serial(0, tx) as t:
        add(total, 0, numbers[t])
    return total[0]


@dataclass(frozen=True)
class _Best:
    """The largest logit of each slice, and its first token."""

    vocab: int
    slices: int
    logits: Buffer
    tokens: Buffer

    def find(self, logits: Buffer, row: Expr, piece: Expr, tx: Expr) -> None:
        scratch, best, token = shared(_THREADS + 16), local(1), local(1, "int32")
        put(best, 0, _LOWEST)
        put(token, 0, self.vocab)
        with I.serial(0, _RUN) as i:
            at = keep(piece * _SLICE + i * _THREADS + tx)
            with I.If(at < self.vocab), I.Then():
                logit = keep(logits[row, 0, at])
                first = I.And(token[0] == self.vocab, logit >= best[0])
                with I.If(I.Or(logit > best[0], first)), I.Then():
                    put(best, 0, logit)
                    put(token, 0, at)
        top = keep(reduced(scratch, tx, _THREADS, best[0], I.max))
        first = self._first(scratch, tx, _THREADS, best[0] == top, token[0])
        with I.If(tx == 0), I.Then():
            put(self.logits, (row, piece), top)
            put(self.tokens, (row, piece), first)

    def _first(self, scratch: Buffer, tx: Expr, threads: int, wanted: Expr, token: Expr) -> Expr:
        """The lowest token of those that are wanted; numbers of this size are exact in float32."""
        number = I.if_then_else(wanted, f32(token), I.float32(self.vocab))
        return I.cast(reduced(scratch, tx, threads, number, I.min), "int32")

    def logit(self, row: Expr, tx: Expr, threads: int) -> Expr:
        """The largest of all, for every invocation."""
        best = local(1)
        put(best, 0, _LOWEST)
        _each(self.slices, threads, tx, lambda at: put(best, 0, I.max(best[0], self.logits[row, at])))
        return keep(reduced(shared(threads + 16), tx, threads, best[0], I.max))

    def greedy(self, token: Buffer, row: Expr, tx: Expr) -> None:
        top, mine = self.logit(row, tx, _DRAW_THREADS), local(1, "int32")
        put(mine, 0, self.vocab)

        def consider(at: Expr) -> None:
            with I.If(self.logits[row, at] == top), I.Then():
                put(mine, 0, I.min(mine[0], self.tokens[row, at]))

        _each(self.slices, _DRAW_THREADS, tx, consider)
        first = self._first(shared(_DRAW_THREADS + 16), tx, _DRAW_THREADS, mine[0] < self.vocab, mine[0])
        with I.If(tx == 0), I.Then():
            put(token, row, I.min(first, self.vocab - 1))


@dataclass(frozen=True)
class _List:
    """Tokens that may be drawn, by id, with their weights; how many, and the weight of the whole vocabulary."""

    weights: Buffer
    tokens: Buffer
    size: Buffer
    total: Buffer


@dataclass(frozen=True)
class _Levels:
    """Sum and number of the weights of each magnitude in each slice: level 0 is 1, level i is 2**-i up to 15."""

    slices: int
    sums: Buffer
    counts: Buffer

    @staticmethod
    def _of(weight: Expr) -> Expr:
        """The level of a weight: its binary exponent, and from 2**-16 down its eighth part."""
        below = keep(I.max(127 - I.cast(I.shift_right(_bits(weight), I.uint32(23)), "int32"), 0))
        return I.if_then_else(below < 16, below, 14 + I.shift_right(below, 3))

    def weigh(
        self, logits: Buffer, weights: Buffer, top: Expr, inverse: Expr, row: Expr, piece: Expr, tx: Expr
    ) -> None:
        """Weights of a slice, relative to the best, and its levels: each invocation counts in a column of its own."""
        sums, counts = shared(_LEVELS * _THREADS), shared(_LEVELS * _THREADS, "int32")
        with I.serial(0, _LEVELS) as level:
            put(sums, level * _THREADS + tx, 0.0)
            put(counts, level * _THREADS + tx, 0)
        with I.serial(0, _RUN) as i:
            at = keep(piece * _SLICE + i * _THREADS + tx)
            with I.If(at < int(logits.shape[2])), I.Then():
                weight = local(1)
                put(weight, 0, I.exp((logits[row, 0, at] - top) * inverse))
                put(weights, (row, at), weight[0])
                column = keep(self._of(weight[0]) * _THREADS + tx)
                add(sums, column, weight[0])
                add(counts, column, 1)
        barrier()
        with I.If(tx < _LEVELS), I.Then():
            mass, count = local(1), local(1, "int32")
            put(mass, 0, 0.0)
            put(count, 0, 0)
            with I.serial(0, _THREADS) as t:
                add(mass, 0, sums[tx * _THREADS + t])
                add(count, 0, counts[tx * _THREADS + t])
            put(self.sums, (row, piece, tx), mass[0])
            put(self.counts, (row, piece, tx), count[0])

    def last(self, top_k: Buffer, top_p: Buffer, found: _List, row: Expr, piece: Expr, tx: Expr) -> Expr:
        """The last level with tokens that top-k or, without it, top-p leaves; all levels where both are off."""
        sums, counts, last = shared(_LEVELS), shared(_LEVELS, "int32"), shared(1, "int32")
        with I.If(tx < _LEVELS), I.Then():
            mass, count = local(1), local(1, "int32")
            put(mass, 0, 0.0)
            put(count, 0, 0)
            with I.serial(0, self.slices) as other:
                add(mass, 0, self.sums[row, other, tx])
                add(count, 0, self.counts[row, other, tx])
            put(sums, tx, mass[0])
            put(counts, tx, count[0])
        barrier()
        with I.If(tx == 0), I.Then():
            total, mass, count = local(1), local(1), local(1, "int32")
            put(total, 0, 0.0)
            with I.serial(0, _LEVELS) as level:
                add(total, 0, sums[level])
            put(mass, 0, 0.0)
            put(count, 0, 0)
            put(last, 0, _LEVELS)
            with I.serial(0, _LEVELS) as level, I.If(last[0] == _LEVELS), I.Then():
                add(mass, 0, sums[level])
                add(count, 0, counts[level])
                by_count = I.And(top_k[row] > 0, count[0] >= top_k[row])
                by_mass = I.And(I.And(top_k[row] <= 0, top_p[row] < 1), mass[0] >= top_p[row] * total[0])
                with I.If(I.Or(I.Or(by_count, by_mass), level == _LEVELS - 1)), I.Then():
                    put(last, 0, level)
            with I.If(piece == 0), I.Then():
                put(found.total, row, total[0])
                put(found.size, row, count[0])
        barrier()
        return last[0]

    def gather(self, weights: Buffer, found: _List, last: Expr, row: Expr, piece: Expr, tx: Expr) -> None:
        """Append a slice's tokens of the levels up to `last` to the list, behind those of the slices before it."""
        last, vocab = keep(last), int(weights.shape[1])
        before, mine, place = local(1), local(1, "int32"), local(1, "int32")
        put(before, 0, 0.0)

        def count_slice(other: Expr) -> None:
            with I.serial(0, last + 1) as level:
                add(before, 0, f32(self.counts[row, other, level]))

        _each(piece, _THREADS, tx, count_slice)
        begin = keep(I.cast(reduced(shared(_THREADS + 16), tx, _THREADS, before[0], _plus), "int32"))

        def each(do: Callable[[Expr, Expr], None]) -> None:
            with I.serial(0, _RUN) as i:
                at = keep(piece * _SLICE + tx * _RUN + i)
                with I.If(at < vocab), I.Then():
                    weight = local(1)
                    put(weight, 0, weights[row, at])
                    with I.If(self._of(weight[0]) <= last), I.Then():
                        do(at, weight[0])

        put(mine, 0, 0)
        each(lambda at, weight: add(mine, 0, 1))
        put(place, 0, begin + _before(shared(_THREADS, "int32"), tx, mine[0]))

        def append(at: Expr, weight: Expr) -> None:
            put(found.weights, (row, place[0]), weight)
            put(found.tokens, (row, place[0]), at)
            add(place, 0, 1)

        each(append)


class _Draw:
    """The draw from a list, by one workgroup.

    A prefix of the list, sorted by weight and then by id, is a `limit` and a number of `ties`: the weights above the
    limit, and the first `ties` of those that are equal to it.
    """

    def __init__(self, found: _List, row: Expr, tx: Expr) -> None:
        self.list, self.row, self.tx = found, row, tx
        self.count = keep(found.size[row])
        self.scratch = shared(_DRAW_THREADS + 16)
        self.own = shared(_DIGITS * _DRAW_THREADS)
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
            missing = (wanted - self.above[0]) / _weight(self.bits[1])
            self._shorten(I.max(I.cast(I.ceil(I.min(missing, I.float32(1 << 24))), "int32"), 1))
        smallest = keep(_bits(I.max(min_p, I.float32(_CLIPPED))))
        with I.If(I.And(tx == 0, smallest > self.bits[0])), I.Then():
            put(self.bits, 0, smallest - I.uint32(1))
            put(self.ties, 0, 0)
        barrier()
        goal = keep(uniform * self._mass())
        with I.If(I.Or(top_k > 0, top_p < 1)):
            with I.Then():
                self._draw_by_weight(goal, token)
            with I.Else():
                above = lambda weight: _bits(weight) > self.bits[0]  # noqa: E731
                self._draw_by_id(lambda weight: I.if_then_else(above(weight), weight, I.float32(0)), goal, token)

    def _each(self, do: Callable[[Expr], None]) -> None:
        """do(weight) for all of the list, in no order."""

        def load(at: Expr) -> None:
            weight = local(1)
            put(weight, 0, self.list.weights[self.row, at])
            do(weight[0])

        _each(self.count, _DRAW_THREADS, self.tx, load)

    def _sum(self, value: Callable[[Expr], Expr]) -> Expr:
        """The sum of value(weight) over the list, for every invocation."""
        mine = local(1)
        put(mine, 0, 0.0)
        self._each(lambda weight: add(mine, 0, value(weight)))
        return keep(reduced(self.scratch, self.tx, _DRAW_THREADS, mine[0], _plus))

    def _equal(self) -> Expr:
        """How many weights are equal to the limit."""
        return self._sum(lambda weight: I.if_then_else(_bits(weight) == self.bits[0], I.float32(1), I.float32(0)))

    def _mass(self) -> Expr:
        """The sum of the prefix."""
        above = self._sum(lambda weight: I.if_then_else(_bits(weight) > self.bits[0], weight, I.float32(0)))
        ties = I.min(f32(self.ties[0]), self._equal())
        return above + ties * _weight(self.bits[0])

    def _shorten(self, ties: Expr) -> None:
        """The prefix ends at what the search found, with so many of its equals, unless it ended before."""
        with I.If(self.tx == 0), I.Then():
            with I.If(self.bits[1] > self.bits[0]):
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
        parts = _DRAW_THREADS // _DIGITS
        barrier()
        with I.If(tx == 0), I.Then():
            put(self.bits, 1, I.uint32(0))
            put(self.above, 0, 0.0)
        barrier()
        with I.serial(0, _WEIGHT_BITS // _DIGIT_BITS) as turn:
            shift = keep(I.cast(_WEIGHT_BITS - _DIGIT_BITS - turn * _DIGIT_BITS, "uint32"))
            high = keep(self.bits[1])
            with I.serial(0, _DIGITS) as digit:
                put(own, digit * _DRAW_THREADS + tx, 0.0)

            def count(weight: Expr, shift: Expr = shift, high: Expr = high) -> None:
                seen = keep(I.shift_right(_bits(weight), shift))
                with I.If(I.shift_right(seen, I.uint32(_DIGIT_BITS)) == high), I.Then():
                    digit = I.cast(I.bitwise_and(seen, I.uint32(_DIGITS - 1)), "int32")
                    add(own, digit * _DRAW_THREADS + tx, value(weight))

            self._each(count)
            barrier()
            mine = local(1)
            put(mine, 0, 0.0)
            with I.serial(0, _DIGITS) as i:
                add(mine, 0, own[tx // parts * _DRAW_THREADS + i * parts + tx % parts])
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
            equal = I.if_then_else(_bits(weight) == self.bits[0], weight * share, I.float32(0))
            return I.if_then_else(_bits(weight) > self.bits[0], weight, equal)

        self._search(value, goal, strict=True)
        found = keep(self.bits[1])
        rank = I.floor((goal - self.above[0]) / _weight(found))
        last = I.if_then_else(found == self.bits[0], f32(self.ties[0] - 1), I.float32(1 << 24))
        rank = keep(I.max(I.min(rank, last), I.float32(0)))
        self._draw_by_id(
            lambda weight: I.if_then_else(_bits(weight) == found, I.float32(1), I.float32(0)), rank, token
        )

    def _draw_by_id(self, value: Callable[[Expr], Expr], goal: Expr, token: Buffer) -> None:
        """The token at which the sum of values, by id, passes `goal`, else the last one with a value."""
        tx, weights, scratch = self.tx, self.list.weights, self.scratch
        share = keep(ceildiv(self.count, _DRAW_THREADS))
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
        put(running, 0, _before(scratch, tx, mine[0]))
        none = I.float32(_DRAW_THREADS)
        passes = I.And(mine[0] > 0, running[0] + mine[0] > goal)
        first = keep(reduced(scratch, tx, _DRAW_THREADS, I.if_then_else(passes, f32(tx), none), I.min))
        last = keep(reduced(scratch, tx, _DRAW_THREADS, I.if_then_else(mine[0] > 0, f32(tx), I.float32(0)), I.max))
        with I.If(f32(tx) == I.if_then_else(first < none, first, last)), I.Then():
            put(chosen, 0, -1)

            def walk(at: Expr, one: Expr) -> None:
                with I.If(I.Or(chosen[0] < 0, running[0] <= goal)), I.Then():
                    add(running, 0, one)
                    put(chosen, 0, at)

            each(walk)
            put(token, self.row, self.list.tokens[self.row, I.max(chosen[0], 0)])
