"""Sampling on GPUs, with the signatures that MLC's hosts call: softmax, sort, top-p, penalties, bias, bit mask.

`sample`, which hosts of our own call, is in `sample.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
)
from tir_schedules.gpu.sample import sample
from tir_schedules.gpu.sort import argsort_probs, sort_tile
from tir_schedules.op import Op, by_hand

_THREADS = 256
MASKED = -3.4e38  # a logit that is never drawn


def softmax_with_temperature(vocab: int, threads: int = _THREADS) -> tirx.PrimFunc:
    """logits f32[b, 1, V], temperature f32[b] -> probabilities f32[b, 1, V]; temperature 0 is the one-hot limit."""
    b = tirx.Var("b", "int64")
    arguments = {
        "logits": Tensor((b, 1, vocab), "float32"),
        "temperature": Tensor((b,), "float32"),
        "out": Tensor((b, 1, vocab), "float32"),
    }

    def body(logits: Buffer, temperature: Buffer, out: Buffer) -> None:
        with launch(threads, b) as (row, _, tx):
            scratch, mine = shared(threads + 16), local(1)
            put(mine, 0, LOWEST)

            def each(do: Callable[[Expr], None]) -> None:
                with I.serial(0, ceildiv(vocab, threads)) as i:
                    at = keep(i * threads + tx)
                    with I.If(at < vocab), I.Then():
                        do(at)

            each(lambda at: put(mine, 0, I.max(mine[0], logits[row, 0, at])))
            top = keep(reduced(scratch, tx, threads, mine[0], I.max))
            inverse = keep(I.float32(1) / I.max(temperature[row], I.float32(1e-6)))
            weight = lambda at: I.exp((logits[row, 0, at] - top) * inverse)  # noqa: E731
            put(mine, 0, 0.0)
            each(lambda at: add(mine, 0, weight(at)))
            total = keep(reduced(scratch, tx, threads, mine[0], lambda a, c: a + c))
            each(lambda at: put(out, (row, 0, at), weight(at) / total))

    return function("softmax_with_temperature", arguments, body)


def sample_with_top_p(vocab: int, threads: int = _THREADS) -> tirx.PrimFunc:
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
    share = -(-vocab // threads)

    def body(probs: Buffer, ids: Buffer, uniform: Buffer, row: Buffer, top_p: Buffer, token: Buffer) -> None:
        with launch(threads, n) as (j, _, tx):
            r = keep(row[j])
            sums, found = shared(threads), shared(2, "int32")
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


# Those that can be made again, and the knobs that count.
SAMPLING: Mapping[str, tuple[str, ...]] = {
    "softmax_with_temperature": ("softmax_threads",),
    "argsort_probs": ("sort_digit_bits", "sort_run"),
    "sample_with_top_p": ("top_p_threads",),
}


def sampling_knobs(kind: str, knobs: Mapping[str, int | str]) -> dict[str, int]:
    """What the knobs of a sampling function are."""
    tile = sort_tile(knobs)
    default = {"sort_digit_bits": tile.digit_bits, "sort_run": tile.run}
    return {name: int(knobs.get(name, default.get(name, _THREADS))) for name in SAMPLING[kind]}


def sampling(func: tirx.PrimFunc, op: Op, knobs: Mapping[str, int | str]) -> tirx.PrimFunc:
    """A sampling function with the knobs that are its own; the one that there is where they say nothing."""
    found, vocab = sampling_knobs(op.kind, knobs), op.int("vocab")
    if found == sampling_knobs(op.kind, {}):
        return func
    if op.kind == "argsort_probs":
        return argsort_probs(vocab, sort_tile(found))
    make = softmax_with_temperature if op.kind == "softmax_with_temperature" else sample_with_top_p
    return make(vocab, *found.values())
