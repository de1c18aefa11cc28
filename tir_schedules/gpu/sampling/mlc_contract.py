"""Sampling functions that MLC's hosts call: softmax, top-p, penalties, bias, bit mask (and `sort.py`).

`sample.py` has the function that our own hosts call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, function_of, overflowed, put
from tir_schedules.gpu.kernel import HIGHEST, LOWEST, barrier, ceildiv, keep, launch, local, reduced, shared
from tir_schedules.gpu.sampling.sample import sample
from tir_schedules.gpu.sampling.sort import argsort_probs, sort_tile
from tir_schedules.op import Op, by_hand
from tir_schedules.rule import Knobs, NamedRule, hand_written
from tir_schedules.sampling import FORBID, SIGNATURES, dimensions

_THREADS = 256
MASKED = -3.4e38  # a logit that is never drawn


def softmax_with_temperature(vocab: int, threads: int = _THREADS) -> tirx.PrimFunc:
    """Probabilities: three passes over the logits of a row by one workgroup."""

    def body(logits: Buffer, temperature: Buffer, out: Buffer) -> None:
        with launch(threads, logits.shape[0]) as (row, _, tx):
            scratch, mine = shared(threads + 16), local(1)
            put(mine, 0, LOWEST)

            def each(do: Callable[[Expr], None]) -> None:
                with I.serial(0, ceildiv(vocab, threads)) as i:
                    at = keep(i * threads + tx)
                    with I.If(at < vocab), I.Then():
                        do(at)

            def compare(at: Expr) -> None:
                logit = keep(logits[row, 0, at])
                put(mine, 0, I.if_then_else(overflowed(logit), I.float32(HIGHEST), I.max(mine[0], logit)))

            each(compare)
            top = keep(reduced(scratch, tx, threads, mine[0], I.max))
            inverse = keep(I.float32(1) / I.max(temperature[row], I.float32(1e-6)))
            weight = lambda at: I.exp((logits[row, 0, at] - top) * inverse)  # noqa: E731
            put(mine, 0, 0.0)
            each(lambda at: add(mine, 0, weight(at)))
            total = keep(reduced(scratch, tx, threads, mine[0], lambda a, c: a + c))
            # NaN by its bits, of a number at hand: WGSL has no constant NaN, and drivers differ in x / NaN.
            nan = lambda at: I.bitwise_or(I.reinterpret("uint32", logits[row, 0, at]), I.uint32(0x7FC00000))  # noqa: E731
            with I.If(top < HIGHEST):
                with I.Then():
                    each(lambda at: put(out, (row, 0, at), weight(at) / total))
                with I.Else():
                    each(lambda at: put(out, (row, 0, at), I.reinterpret("float32", nan(at))))

    return function_of(SIGNATURES["softmax_with_temperature"], dimensions(vocab), body)


def sample_with_top_p(vocab: int, threads: int = _THREADS) -> tirx.PrimFunc:
    """A token of the nucleus: each invocation has a slice of the sorted probabilities."""
    share = -(-vocab // threads)

    def body(probs: Buffer, ids: Buffer, uniform: Buffer, row: Buffer, top_p: Buffer, token: Buffer) -> None:
        with launch(threads, uniform.shape[0]) as (j, _, tx):
            r = keep(row[j])
            sums, position = shared(threads), shared(2, "int32")  # end of the nucleus; the drawn token's
            nucleus = shared(1)
            before, running, total = local(1), local(1), local(1)
            first = keep(tx * share)
            last = keep(I.min(first + share, vocab))
            # Step 1: the mass of each invocation's share, and the mass before it.
            put(total, 0, 0.0)
            with I.serial(0, I.max(last - first, 0)) as i:
                add(total, 0, probs[r, first + i])
            put(sums, tx, total[0])
            with I.If(tx == 0), I.Then():
                put(position, 0, vocab - 1)
                put(position, 1, 0)
                put(nucleus, 0, 0.0)
            barrier()
            put(before, 0, 0.0)
            with I.serial(0, tx) as t:
                add(before, 0, sums[t])
            # Step 2: the end of the nucleus, by the invocation in whose share the mass reaches top_p, or by the last
            # one if rounding keeps the mass below.
            goal_mass = keep(I.min(top_p[r], I.float32(1)))
            here = I.And(first < vocab, I.Or(tx == 0, before[0] < goal_mass))
            is_last = last >= vocab
            with I.If(I.And(here, I.Or(before[0] + total[0] >= goal_mass, is_last))), I.Then():
                put(running, 0, before[0])
                with (
                    I.serial(0, I.max(last - first, 0)) as i,
                    I.If(I.Or(first + i == 0, running[0] < goal_mass)),
                    I.Then(),
                ):
                    add(running, 0, probs[r, first + i])
                    put(position, 0, first + i)
                put(nucleus, 0, running[0])
            barrier()
            # Step 3: the token at which the mass passes the goal.
            goal = keep(uniform[j] * nucleus[0])
            end = keep(position[0])
            inside = I.And(first <= end, I.Or(tx == 0, before[0] <= goal))
            with I.If(I.And(inside, I.Or(before[0] + total[0] > goal, last > end))), I.Then():
                put(running, 0, before[0])
                own_count = I.max(I.min(last, end + 1) - first, 0)
                with I.serial(0, own_count) as i, I.If(I.Or(first + i == 0, running[0] <= goal)), I.Then():
                    add(running, 0, probs[r, first + i])
                    put(position, 1, first + i)
            barrier()
            with I.If(tx == 0), I.Then():
                put(token, j, I.if_then_else(overflowed(probs[r, 0]), -1, ids[r, position[1]]))

    return function_of(SIGNATURES["sample_with_top_p"], dimensions(vocab), body)


def apply_logit_bias_inplace(vocab: int) -> tirx.PrimFunc:
    """One invocation for each bias."""

    def body(logits: Buffer, row: Buffer, token: Buffer, bias: Buffer) -> None:
        n = bias.shape[0]
        with launch(64, ceildiv(n, 64)) as (bx, _, tx):
            i = keep(bx * 64 + tx)
            with I.If(i < I.cast(n, "int32")), I.Then():
                put(logits, (row[i], token[i]), logits[row[i], token[i]] + bias[i])

    return function_of(SIGNATURES["apply_logit_bias_inplace"], dimensions(vocab), body)


def apply_penalty_inplace(vocab: int) -> tirx.PrimFunc:
    """One invocation for each token that occurred."""

    def body(logits: Buffer, seq: Buffer, entry: Buffer, token: Buffer, count: Buffer, penalties: Buffer) -> None:
        k = entry.shape[0]
        with launch(64, ceildiv(k, 64)) as (bx, _, tx):
            i = keep(bx * 64 + tx)
            with I.If(i < I.cast(k, "int32")), I.Then():
                which = keep(entry[i])
                row, column = keep(seq[which]), keep(token[i])
                less = penalties[which, 0] + I.cast(count[i], "float32") * penalties[which, 1]
                logit = keep(logits[row, column] - less)
                again = keep(penalties[which, 2])
                put(logits, (row, column), I.if_then_else(logit < I.float32(0), logit * again, logit / again))

    return function_of(SIGNATURES["apply_penalty_inplace"], dimensions(vocab), body)


def apply_bitmask_inplace(vocab: int) -> tirx.PrimFunc:
    """One invocation for each logit."""

    def body(logits: Buffer, seq: Buffer, mask: Buffer) -> None:
        with launch(_THREADS, -(-vocab // _THREADS), seq.shape[0]) as (bx, i, tx):
            v = keep(bx * _THREADS + tx)
            with I.If(v < vocab), I.Then():
                row = keep(seq[i])
                bit = I.bitwise_and(I.shift_right(mask[row, v // 32], v % 32), 1)
                with I.If(bit == 0), I.Then():
                    put(logits, (row, v), MASKED)

    return function_of(SIGNATURES["apply_bitmask_inplace"], dimensions(vocab), body)


def forbid_inplace(vocab: int, ranges: Sequence[tuple[int, int]]) -> tirx.PrimFunc:
    """Logits of the tokens in these ranges [begin, end) become the lowest, by one invocation for each."""
    count = sum(end - begin for begin, end in ranges)

    def body(logits: Buffer) -> None:
        with launch(64, ceildiv(count, 64), logits.shape[0]) as (bx, row, tx):
            i = keep(bx * 64 + tx)
            token, before = i, 0
            for begin, end in ranges:
                token = I.if_then_else(i >= before, i + (begin - before), token)
                before += end - begin
            with I.If(i < count), I.Then():
                put(logits, (row, 0, keep(token)), MASKED)

    return by_hand({FORBID.name: function_of(FORBID, dimensions(vocab), body)})[FORBID.name]


def sampling_functions(vocab: int) -> dict[str, tirx.PrimFunc]:
    """Every sampling function of the library by its name."""
    makers: tuple[Callable[[int], tirx.PrimFunc], ...] = (
        sample,
        softmax_with_temperature,
        argsort_probs,
        sample_with_top_p,
        apply_logit_bias_inplace,
        apply_penalty_inplace,
        apply_bitmask_inplace,
    )
    made = {make.__name__: make(vocab) for make in makers}
    return by_hand({name: made[name] for name in SIGNATURES if name in made}, vocab=vocab)


# Functions with knobs.
SAMPLING: Mapping[str, tuple[str, ...]] = {
    "softmax_with_temperature": ("softmax_threads",),
    "argsort_probs": ("sort_digit_bits", "sort_run"),
    "sample_with_top_p": ("top_p_threads",),
}


def sampling_knobs(kind: str, knobs: Knobs) -> dict[str, int]:
    """The knobs of a sampling function and their values."""
    tile = sort_tile(knobs)
    default = {"sort_digit_bits": tile.digit_bits, "sort_run": tile.run}
    return {name: int(knobs.get(name, default.get(name, _THREADS))) for name in SAMPLING[kind]}


def sampling(func: tirx.PrimFunc, op: Op, knobs: Knobs) -> tirx.PrimFunc:
    """A sampling function with its knobs; `func` itself if they have their defaults."""
    own_knobs, vocab = sampling_knobs(op.kind, knobs), op.int("vocab")
    if own_knobs == sampling_knobs(op.kind, {}):
        return func
    if op.kind == "argsort_probs":
        return argsort_probs(vocab, sort_tile(own_knobs))
    make = softmax_with_temperature if op.kind == "softmax_with_temperature" else sample_with_top_p
    return make(vocab, *own_knobs.values())


RULES = (NamedRule("gpu.sampling", tuple(SAMPLING), hand_written(sampling)),)
