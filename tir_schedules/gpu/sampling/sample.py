"""`sample` on GPUs: the token that the CPU's kernel draws, without sorting the vocabulary.

Kernels: the largest logit of each slice of the vocabulary; weights, and their number at each magnitude; a list of the
tokens that may be drawn; the draw, or the largest logit of all. Only the last two run in one workgroup, as a rule over
a few tokens. Instead of sorting, the draw searches the bits of weights digit by digit: they have the order of the
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, f32, function_of, overflowed, put
from tir_schedules.gpu.kernel import HIGHEST, barrier, keep, launch, local, pin, reduced, shared, workspace
from tir_schedules.gpu.sampling.draw import DRAW_THREADS, Candidates, Draw, bits_of, each_below, plus, sum_before
from tir_schedules.sampling import SIGNATURES, dimensions

_THREADS = 64
_RUN = 32  # elements of a slice for each invocation
_SLICE = _THREADS * _RUN
_LEVELS = 32  # magnitudes of weights
_LOWEST = -3.4e38


def sample(vocab: int) -> tirx.PrimFunc:
    """The token that `SIGNATURES["sample"]` draws; sums are float32. `logits` are left as they are."""
    slices = -(-vocab // _SLICE)

    def body(logits: Buffer, temperature: Buffer, *rest: Buffer) -> None:
        top_p, top_k, min_p, uniform, token = rest
        b = logits.shape[0]
        best = _Best(vocab, slices, workspace((b, slices), "float32"), workspace((b, slices), "int32"))
        weights = workspace((b, vocab), "float32")
        levels = _Levels(slices, workspace((b, slices, _LEVELS), "float32"), workspace((b, slices, _LEVELS), "int32"))
        candidates = Candidates(
            workspace((b, vocab), "float32"), workspace((b, vocab), "int32"), workspace((b,), "int32"),
            workspace((b,), "float32"),
        )  # fmt: skip
        with launch(_THREADS, slices, b) as (slice_index, row, tx):
            best.find(logits, row, slice_index, tx)
        with launch(_THREADS, slices, b) as (slice_index, row, tx), I.If(temperature[row] > 0), I.Then():
            inverse = keep(I.float32(1) / I.max(temperature[row], I.float32(1e-30)))
            levels.weigh(logits, weights, best.logit(row, tx, _THREADS), inverse, row, slice_index, tx)
        with launch(_THREADS, slices, b) as (slice_index, row, tx), I.If(temperature[row] > 0), I.Then():
            last = levels.last(top_k, top_p, candidates, row, slice_index, tx)
            levels.gather(weights, candidates, last, row, slice_index, tx)
        # Two kernels: one would have more buffers than WebGPU lets it have.
        with launch(DRAW_THREADS, b) as (row, _, tx), I.If(temperature[row] > 0), I.Then():
            Draw(candidates, row, tx).run(top_k[row], top_p[row], min_p[row], uniform[row], token)
        with launch(DRAW_THREADS, b) as (row, _, tx), I.If(temperature[row] <= 0), I.Then():
            best.greedy(token, row, tx)

    return function_of(SIGNATURES["sample"], dimensions(vocab), body)


@dataclass(frozen=True)
class _Best:
    """The largest logit of each slice, and its first token."""

    vocab: int
    slices: int
    logits: Buffer
    tokens: Buffer

    def find(self, logits: Buffer, row: Expr, slice_index: Expr, tx: Expr) -> None:
        scratch, best, token = shared(_THREADS + 16), local(1), local(1, "int32")
        put(best, 0, _LOWEST)
        put(token, 0, self.vocab)
        with I.serial(0, _RUN) as i:
            at = keep(slice_index * _SLICE + i * _THREADS + tx)
            with I.If(at < self.vocab), I.Then():
                number = keep(logits[row, 0, at])
                logit = pin(I.if_then_else(overflowed(number), I.float32(HIGHEST), number))
                first = I.And(token[0] == self.vocab, logit >= best[0])
                with I.If(I.Or(logit > best[0], first)), I.Then():
                    put(best, 0, logit)
                    put(token, 0, at)
        top = keep(reduced(scratch, tx, _THREADS, best[0], I.max))
        first = self._first(scratch, tx, _THREADS, best[0] == top, token[0])
        with I.If(tx == 0), I.Then():
            put(self.logits, (row, slice_index), top)
            put(self.tokens, (row, slice_index), first)

    def _first(self, scratch: Buffer, tx: Expr, threads: int, eligible: Expr, token: Expr) -> Expr:
        """The lowest token among those with `eligible`; numbers of this size are exact in float32."""
        number = I.if_then_else(eligible, f32(token), I.float32(self.vocab))
        return I.cast(reduced(scratch, tx, threads, number, I.min), "int32")

    def logit(self, row: Expr, tx: Expr, threads: int) -> Expr:
        """The largest logit of the row, for every invocation."""
        best = local(1)
        put(best, 0, _LOWEST)
        each_below(self.slices, threads, tx, lambda at: put(best, 0, I.max(best[0], self.logits[row, at])))
        return keep(reduced(shared(threads + 16), tx, threads, best[0], I.max))

    def greedy(self, token: Buffer, row: Expr, tx: Expr) -> None:
        top, mine = self.logit(row, tx, DRAW_THREADS), local(1, "int32")
        put(mine, 0, self.vocab)

        def consider(at: Expr) -> None:
            with I.If(self.logits[row, at] == top), I.Then():
                put(mine, 0, I.min(mine[0], self.tokens[row, at]))

        each_below(self.slices, DRAW_THREADS, tx, consider)
        first = self._first(shared(DRAW_THREADS + 16), tx, DRAW_THREADS, mine[0] < self.vocab, mine[0])
        with I.If(tx == 0), I.Then():
            put(token, row, I.if_then_else(I.And(first < self.vocab, top < HIGHEST), first, -1))


@dataclass(frozen=True)
class _Levels:
    """Sum and number of weights by magnitude in each slice: level 0 is 1, level i is 2**-i up to 15."""

    slices: int
    sums: Buffer
    counts: Buffer

    @staticmethod
    def _of(weight: Expr) -> Expr:
        """The level of a weight: its negated binary exponent; from 2**-16 down eight exponents share a level."""
        below = keep(I.max(127 - I.cast(I.shift_right(bits_of(weight), I.uint32(23)), "int32"), 0))
        return I.if_then_else(below < 16, below, 14 + I.shift_right(below, 3))

    def weigh(
        self, logits: Buffer, weights: Buffer, top: Expr, inverse: Expr, row: Expr, slice_index: Expr, tx: Expr
    ) -> None:
        """Weights of a slice relative to the largest logit `top`, and levels; each invocation has its own column.

        No level has a token where a logit of the row is NaN or infinity, so that none is drawn.
        """
        sums, counts = shared(_LEVELS * _THREADS), shared(_LEVELS * _THREADS, "int32")
        with I.serial(0, _LEVELS) as level:
            put(sums, level * _THREADS + tx, 0.0)
            put(counts, level * _THREADS + tx, 0)
        with I.serial(0, _RUN) as i:
            at = keep(slice_index * _SLICE + i * _THREADS + tx)
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
            put(self.sums, (row, slice_index, tx), mass[0])
            put(self.counts, (row, slice_index, tx), I.if_then_else(top < HIGHEST, count[0], 0))

    def last(
        self, top_k: Buffer, top_p: Buffer, candidates: Candidates, row: Expr, slice_index: Expr, tx: Expr
    ) -> Expr:
        """The last level with tokens that top-k or, without it, top-p keeps; all levels if both are off."""
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
            with I.If(slice_index == 0), I.Then():
                put(candidates.total, row, total[0])
                put(candidates.size, row, count[0])
        barrier()
        return last[0]

    def gather(
        self, weights: Buffer, candidates: Candidates, last: Expr, row: Expr, slice_index: Expr, tx: Expr
    ) -> None:
        """Append a slice's tokens of levels up to `last` to the list, after those of earlier slices."""
        last, vocab = keep(last), int(weights.shape[1])
        before, count, position = local(1), local(1, "int32"), local(1, "int32")
        put(before, 0, 0.0)

        def count_slice(other: Expr) -> None:
            with I.serial(0, last + 1) as level:
                add(before, 0, f32(self.counts[row, other, level]))

        each_below(slice_index, _THREADS, tx, count_slice)
        begin = keep(I.cast(reduced(shared(_THREADS + 16), tx, _THREADS, before[0], plus), "int32"))

        def each(do: Callable[[Expr, Expr], None]) -> None:
            with I.serial(0, _RUN) as i:
                at = keep(slice_index * _SLICE + tx * _RUN + i)
                with I.If(at < vocab), I.Then():
                    weight = local(1)
                    put(weight, 0, weights[row, at])
                    with I.If(self._of(weight[0]) <= last), I.Then():
                        do(at, weight[0])

        put(count, 0, 0)
        each(lambda at, weight: add(count, 0, 1))
        put(position, 0, begin + sum_before(shared(_THREADS, "int32"), tx, count[0]))

        def append(at: Expr, weight: Expr) -> None:
            put(candidates.weights, (row, position[0]), weight)
            put(candidates.tokens, (row, position[0]), at)
            add(position, 0, 1)

        each(append)
