"""Sampling on GPUs, with the signatures that MLC's hosts call: softmax, sort, top-p, penalties, bias, bit mask.

`sample`, which hosts of our own call, is in `sample.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import (
    LOWEST,
    Buffer,
    Expr,
    Tensor,
    add,
    barrier,
    ceildiv,
    function,
    keep,
    launch,
    local,
    put,
    reduced,
    shared,
    workspace,
)
from tir_schedules.gpu.sample import sample
from tir_schedules.op import by_hand

_THREADS = 256
_SCAN_THREADS = 64
MASKED = -3.4e38  # a logit that is never drawn

# Radix sort of the 32 bits of a probability, 4 at a time, lowest first. Shared memory holds a count for each digit and
# invocation; more than a few hundred numbers there cost software adapters seconds of compilation.
_DIGIT_BITS = 4
_DIGITS = 1 << _DIGIT_BITS
_PASSES = 32 // _DIGIT_BITS
_SORT_THREADS = _DIGITS
_RUN = 64  # neighbouring elements that one invocation takes, in order
_SORT_BLOCK = _SORT_THREADS * _RUN


def softmax_with_temperature(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, 1, V], temperature f32[b] -> probabilities f32[b, 1, V]; temperature 0 is the one-hot limit."""
    b = tirx.Var("b", "int64")
    arguments = {
        "logits": Tensor((b, 1, vocab), "float32"),
        "temperature": Tensor((b,), "float32"),
        "out": Tensor((b, 1, vocab), "float32"),
    }

    def body(logits: Buffer, temperature: Buffer, out: Buffer) -> None:
        with launch(_THREADS, b) as (row, _, tx):
            scratch, mine = shared(_THREADS + 16), local(1)
            put(mine, 0, LOWEST)

            def each(do: Callable[[Expr], None]) -> None:
                with I.serial(0, ceildiv(vocab, _THREADS)) as i:
                    at = keep(i * _THREADS + tx)
                    with I.If(at < vocab), I.Then():
                        do(at)

            each(lambda at: put(mine, 0, I.max(mine[0], logits[row, 0, at])))
            top = keep(reduced(scratch, tx, _THREADS, mine[0], I.max))
            inverse = keep(I.float32(1) / I.max(temperature[row], I.float32(1e-6)))
            weight = lambda at: I.exp((logits[row, 0, at] - top) * inverse)  # noqa: E731
            put(mine, 0, 0.0)
            each(lambda at: add(mine, 0, weight(at)))
            total = keep(reduced(scratch, tx, _THREADS, mine[0], lambda a, c: a + c))
            each(lambda at: put(out, (row, 0, at), weight(at) / total))

    return function("softmax_with_temperature", arguments, body)


def argsort_probs(vocab: int) -> tirx.PrimFunc:
    """probs f32[b, V] -> (largest first f32[b, V], their ids i32[b, V]); of equal ones the lower id first.

    A stable radix sort: each pass counts digits by block, sums the counts, and moves the elements.
    """
    b = tirx.Var("b", "int64")
    arguments = {
        "probs": Tensor((b, vocab), "float32"),
        "sorted_probs": Tensor((b, vocab), "float32"),
        "sorted_ids": Tensor((b, vocab), "int32"),
    }
    blocks = -(-vocab // _SORT_BLOCK)

    def body(probs: Buffer, sorted_probs: Buffer, sorted_ids: Buffer) -> None:
        other_probs, other_ids = workspace((b, vocab), "float32"), workspace((b, vocab), "int32")
        counts = workspace((b, _DIGITS, blocks), "int32")
        with launch(_THREADS, -(-vocab // _THREADS), b) as (bx, row, tx):
            at = keep(bx * _THREADS + tx)
            with I.If(at < vocab), I.Then():
                put(sorted_probs, (row, at), probs[row, at])
                put(sorted_ids, (row, at), at)
        here, there = (sorted_probs, sorted_ids), (other_probs, other_ids)

        def sort(digit: Callable[[Expr], Expr], source: tuple[Buffer, Buffer], target: tuple[Buffer, Buffer]) -> None:
            with launch(_SORT_THREADS, blocks, b) as (block, row, tx):
                _count(source[0], counts, digit, block, row, tx, vocab)
            with launch(_SCAN_THREADS, b) as (row, _, tx):
                _prefix_sums(counts, row, tx, blocks)
            with launch(_SORT_THREADS, blocks, b) as (block, row, tx):
                _move(source, target, counts, digit, block, row, tx, vocab)

        # On the host; the kernels of both ways are the same.
        with I.serial(0, _PASSES) as index, I.If(index % 2 == 0):
            with I.Then():
                sort(_digit_of(index), here, there)
            with I.Else():
                sort(_digit_of(index), there, here)

    return function("argsort_probs", arguments, body)


def _digit_of(index: Expr) -> Callable[[Expr], Expr]:
    """The digit that sorts descending in pass `index`."""

    def digit(prob: Expr) -> Expr:
        bits = I.shift_right(I.reinterpret("uint32", I.max(prob, I.float32(0))), I.cast(_DIGIT_BITS * index, "uint32"))
        return (_DIGITS - 1) - I.cast(I.bitwise_and(bits, I.uint32(_DIGITS - 1)), "int32")

    return digit


def _each_of_run(block: Expr, tx: Expr, vocab: int, do: Callable[[Expr], None]) -> None:
    with I.serial(0, _RUN) as i:
        at = keep(block * _SORT_BLOCK + tx * _RUN + i)
        with I.If(at < vocab), I.Then():
            do(at)


def _own_counts(source: Buffer, digit: Callable[[Expr], Expr], block: Expr, row: Expr, tx: Expr, vocab: int) -> Buffer:
    """Shared i32[digits, threads]: how often each digit is in the run of each invocation."""
    own = shared(_DIGITS * _SORT_THREADS, "int32")
    with I.serial(0, _DIGITS) as d:
        put(own, d * _SORT_THREADS + tx, 0)
    _each_of_run(block, tx, vocab, lambda at: add(own, digit(source[row, at]) * _SORT_THREADS + tx, 1))
    barrier()
    return own


def _count(
    source: Buffer, counts: Buffer, digit: Callable[[Expr], Expr], block: Expr, row: Expr, tx: Expr, vocab: int
) -> None:
    """counts[row, digit, block]: invocation d sums digit d."""
    own, total = _own_counts(source, digit, block, row, tx, vocab), local(1, "int32")
    put(total, 0, 0)
    with I.serial(0, _SORT_THREADS) as t:
        add(total, 0, own[tx * _SORT_THREADS + t])
    put(counts, (row, tx, block), total[0])


def _prefix_sums(counts: Buffer, row: Expr, tx: Expr, blocks: int) -> None:
    """counts[row] becomes what comes before each entry, digit by digit and block by block."""
    share = -(-_DIGITS * blocks // _SCAN_THREADS)
    sums, total = shared(_SCAN_THREADS, "int32"), local(2, "int32")

    def each(do: Callable[[Expr, Expr], None]) -> None:
        with I.serial(0, share) as i:
            at = keep(tx * share + i)
            with I.If(at < _DIGITS * blocks), I.Then():
                do(keep(at // blocks), keep(at % blocks))

    put(total, 0, 0)
    each(lambda d, block: add(total, 0, counts[row, d, block]))
    put(sums, tx, total[0])
    barrier()
    put(total, 0, 0)
    with I.serial(0, tx) as t:
        add(total, 0, sums[t])

    def replace(d: Expr, block: Expr) -> None:
        put(total, 1, counts[row, d, block])
        put(counts, (row, d, block), total[0])
        add(total, 0, total[1])

    each(replace)


def _move(
    source: tuple[Buffer, Buffer],
    target: tuple[Buffer, Buffer],
    counts: Buffer,
    digit: Callable[[Expr], Expr],
    block: Expr,
    row: Expr,
    tx: Expr,
    vocab: int,
) -> None:
    """Elements to their places in this pass's order; equal digits keep their order."""
    own, place = _own_counts(source[0], digit, block, row, tx, vocab), local(2, "int32")
    put(place, 0, counts[row, tx, block])
    with I.serial(0, _SORT_THREADS) as t:
        put(place, 1, own[tx * _SORT_THREADS + t])
        put(own, tx * _SORT_THREADS + t, place[0])
        add(place, 0, place[1])
    barrier()

    def move(at: Expr) -> None:
        prob = keep(source[0][row, at])
        slot = keep(digit(prob) * _SORT_THREADS + tx)
        to = keep(own[slot])
        put(own, slot, to + 1)
        put(target[0], (row, to), prob)
        put(target[1], (row, to), source[1][row, at])

    _each_of_run(block, tx, vocab, move)


def sample_with_top_p(vocab: int) -> tirx.PrimFunc:
    """sorted probs f32[b, V], ids i32[b, V], uniform f32[n], row i32[n], top_p f32[b] -> token i32[n].

    The nucleus is the shortest prefix whose mass reaches top_p, at least one token; `uniform` draws in it.
    """
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    arguments = {
        "probs": Tensor((b, vocab), "float32"),
        "ids": Tensor((b, vocab), "int32"),
        "uniform": Tensor((n,), "float32"),
        "row": Tensor((n,), "int32"),
        "top_p": Tensor((b,), "float32"),
        "token": Tensor((n,), "int32"),
    }
    share = -(-vocab // _THREADS)

    def body(probs: Buffer, ids: Buffer, uniform: Buffer, row: Buffer, top_p: Buffer, token: Buffer) -> None:
        with launch(_THREADS, n) as (j, _, tx):
            r = keep(row[j])
            sums, found = shared(_THREADS), shared(2, "int32")
            nucleus = shared(1)
            before, running, total = local(1), local(1), local(1)
            first = keep(tx * share)
            last = keep(I.min(first + share, vocab))
            put(total, 0, 0.0)
            with I.serial(0, I.max(last - first, 0)) as i:
                add(total, 0, probs[r, first + i])
            put(sums, tx, total[0])
            with I.If(tx == 0), I.Then():
                put(found, 0, vocab - 1)
                put(found, 1, 0)
                put(nucleus, 0, 0.0)
            barrier()
            put(before, 0, 0.0)
            with I.serial(0, tx) as t:
                add(before, 0, sums[t])
            # The one invocation in whose share the mass first reaches top_p; the last one if rounding keeps it below.
            wanted = keep(I.min(top_p[r], I.float32(1)))
            here = I.And(first < vocab, I.Or(tx == 0, before[0] < wanted))
            is_last = last >= vocab
            with I.If(I.And(here, I.Or(before[0] + total[0] >= wanted, is_last))), I.Then():
                put(running, 0, before[0])
                with (
                    I.serial(0, I.max(last - first, 0)) as i,
                    I.If(I.Or(first + i == 0, running[0] < wanted)),
                    I.Then(),
                ):
                    add(running, 0, probs[r, first + i])
                    put(found, 0, first + i)
                put(nucleus, 0, running[0])
            barrier()
            goal = keep(uniform[j] * nucleus[0])
            end = keep(found[0])
            inside = I.And(first <= end, I.Or(tx == 0, before[0] <= goal))
            with I.If(I.And(inside, I.Or(before[0] + total[0] > goal, last > end))), I.Then():
                put(running, 0, before[0])
                mine = I.max(I.min(last, end + 1) - first, 0)
                with I.serial(0, mine) as i, I.If(I.Or(first + i == 0, running[0] <= goal)), I.Then():
                    add(running, 0, probs[r, first + i])
                    put(found, 1, first + i)
            barrier()
            with I.If(tx == 0), I.Then():
                put(token, j, ids[r, found[1]])

    return function("sample_with_top_p", arguments, body)


def apply_logit_bias_inplace(vocab: int) -> tirx.PrimFunc:
    """logits f32[b, V][row[i], token[i]] += bias[i]; pairs (row, token) are distinct."""
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    arguments = {
        "logits": Tensor((b, vocab), "float32"),
        "row": Tensor((n,), "int32"),
        "token": Tensor((n,), "int32"),
        "bias": Tensor((n,), "float32"),
    }

    def body(logits: Buffer, row: Buffer, token: Buffer, bias: Buffer) -> None:
        with launch(64, ceildiv(n, 64)) as (bx, _, tx):
            i = keep(bx * 64 + tx)
            with I.If(i < I.cast(n, "int32")), I.Then():
                put(logits, (row[i], token[i]), logits[row[i], token[i]] + bias[i])

    return function("apply_logit_bias_inplace", arguments, body)


def apply_penalty_inplace(vocab: int) -> tirx.PrimFunc:
    """Presence, frequency, then repetition penalty on logits f32[b, V] of tokens that occurred.

    seq i32[n] rows; of[i] says which of them entry i belongs to; token, count i32[k]; penalties f32[n, 3] =
    presence, frequency, repetition. Repetition divides positive and multiplies negative logits (Keskar et al. 2019).
    """
    b, n, k = (tirx.Var(name, "int64") for name in ("b", "n", "k"))
    arguments = {
        "logits": Tensor((b, vocab), "float32"),
        "seq": Tensor((n,), "int32"),
        "of": Tensor((k,), "int32"),
        "token": Tensor((k,), "int32"),
        "count": Tensor((k,), "int32"),
        "penalty": Tensor((n, 3), "float32"),
    }

    def body(logits: Buffer, seq: Buffer, of: Buffer, token: Buffer, count: Buffer, penalty: Buffer) -> None:
        with launch(64, ceildiv(k, 64)) as (bx, _, tx):
            i = keep(bx * 64 + tx)
            with I.If(i < I.cast(k, "int32")), I.Then():
                which = keep(of[i])
                row, column = keep(seq[which]), keep(token[i])
                less = penalty[which, 0] + I.cast(count[i], "float32") * penalty[which, 1]
                logit = keep(logits[row, column] - less)
                again = keep(penalty[which, 2])
                put(logits, (row, column), I.if_then_else(logit < I.float32(0), logit * again, logit / again))

    return function("apply_penalty_inplace", arguments, body)


def apply_bitmask_inplace(vocab: int) -> tirx.PrimFunc:
    """Logits f32[b, V] of rows seq i32[n] become MASKED where bit v % 32 of mask i32[b, ceil(V / 32)] is 0."""
    b, n = tirx.Var("b", "int64"), tirx.Var("n", "int64")
    arguments = {
        "logits": Tensor((b, vocab), "float32"),
        "seq": Tensor((n,), "int32"),
        "mask": Tensor((b, -(-vocab // 32)), "int32"),
    }

    def body(logits: Buffer, seq: Buffer, mask: Buffer) -> None:
        with launch(_THREADS, -(-vocab // _THREADS), n) as (bx, i, tx):
            v = keep(bx * _THREADS + tx)
            with I.If(v < vocab), I.Then():
                row = keep(seq[i])
                bit = I.bitwise_and(I.shift_right(mask[row, v // 32], v % 32), 1)
                with I.If(bit == 0), I.Then():
                    put(logits, (row, v), MASKED)

    return function("apply_bitmask_inplace", arguments, body)


def sampling_functions(vocab: int) -> dict[str, tirx.PrimFunc]:
    """Every sampling function of the library, by its entry point name; they write to their last arguments."""
    makers = (
        sample,
        softmax_with_temperature,
        argsort_probs,
        sample_with_top_p,
        apply_logit_bias_inplace,
        apply_penalty_inplace,
        apply_bitmask_inplace,
    )
    return by_hand({make.__name__: make(vocab) for make in makers}, vocab=vocab)
