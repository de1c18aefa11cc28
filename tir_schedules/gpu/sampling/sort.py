"""`argsort_probs`: a stable radix sort of the bits of probabilities, which have the order of the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, add, function_of, put
from tir_schedules.gpu.kernel import barrier, keep, launch, local, shared, workspace
from tir_schedules.rule import Knobs
from tir_schedules.sampling import SIGNATURES, dimensions

_PROBABILITY_BITS = 30  # of a float32 from 0 to a little above 1
_THREADS = 256  # of the kernel that copies the input
_SCAN_THREADS = 64


@dataclass(frozen=True)
class SortTile:
    """The sort takes `digit_bits` bits at a time, lowest first, in an even number of passes.

    A workgroup has as many invocations as there are digits; each has `run` neighbouring elements, in order. Shared
    memory holds a count for each digit and invocation. More than a few hundred numbers there take software adapters
    seconds to compile.
    """

    digit_bits: int = 4
    run: int = 64

    @property
    def digits(self) -> int:
        return 1 << self.digit_bits

    @property
    def counts(self) -> int:
        """Shared numbers of a workgroup."""
        return self.digits * self.digits

    @property
    def passes(self) -> int:
        return -(-_PROBABILITY_BITS // (2 * self.digit_bits)) * 2

    @property
    def block(self) -> int:
        """Elements of a workgroup."""
        return self.digits * self.run


def sort_tile(knobs: Knobs) -> SortTile:
    """The tile that knobs say."""
    return SortTile(**{name: int(knobs[f"sort_{name}"]) for name in ("digit_bits", "run") if f"sort_{name}" in knobs})


def argsort_probs(vocab: int, tile: SortTile = SortTile()) -> tirx.PrimFunc:
    """`SIGNATURES["argsort_probs"]`, a stable radix sort.

    Each pass counts digits by block, sums the counts, and moves the elements.
    """
    blocks = -(-vocab // tile.block)

    def body(probs: Buffer, sorted_probs: Buffer, sorted_ids: Buffer) -> None:
        b = probs.shape[0]
        other_probs, other_ids = workspace((b, vocab), "float32"), workspace((b, vocab), "int32")
        counts = workspace((b, tile.digits, blocks), "int32")
        with launch(_THREADS, -(-vocab // _THREADS), b) as (bx, row, tx):
            at = keep(bx * _THREADS + tx)
            with I.If(at < vocab), I.Then():
                put(sorted_probs, (row, at), probs[row, at])
                put(sorted_ids, (row, at), at)
        here, there = (sorted_probs, sorted_ids), (other_probs, other_ids)

        def sort(digit: Callable[[Expr], Expr], source: tuple[Buffer, Buffer], target: tuple[Buffer, Buffer]) -> None:
            with launch(tile.digits, blocks, b) as (block, row, tx):
                _count(tile, source[0], counts, digit, block, row, tx)
            with launch(_SCAN_THREADS, b) as (row, _, tx):
                _prefix_sums(tile, counts, row, tx, blocks)
            with launch(tile.digits, blocks, b) as (block, row, tx):
                _move(tile, source, target, counts, digit, block, row, tx)

        # This loop runs on the host; both directions use the same kernels.
        with I.serial(0, tile.passes) as index, I.If(index % 2 == 0):
            with I.Then():
                sort(_digit_of(tile, index), here, there)
            with I.Else():
                sort(_digit_of(tile, index), there, here)

    return function_of(SIGNATURES["argsort_probs"], dimensions(vocab), body)


def _digit_of(tile: SortTile, index: Expr) -> Callable[[Expr], Expr]:
    """The digit of pass `index`, inverted to sort in descending order."""

    def digit(prob: Expr) -> Expr:
        shift = I.cast(tile.digit_bits * index, "uint32")
        bits = I.shift_right(I.reinterpret("uint32", I.max(prob, I.float32(0))), shift)
        return (tile.digits - 1) - I.cast(I.bitwise_and(bits, I.uint32(tile.digits - 1)), "int32")

    return digit


def _each_of_run(tile: SortTile, block: Expr, tx: Expr, vocab: Expr, do: Callable[[Expr], None]) -> None:
    with I.serial(0, tile.run) as i:
        at = keep(block * tile.block + tx * tile.run + i)
        with I.If(at < vocab), I.Then():
            do(at)


def _own_counts(
    tile: SortTile, source: Buffer, digit: Callable[[Expr], Expr], block: Expr, row: Expr, tx: Expr
) -> Buffer:
    """Shared i32[digits, threads]: occurrences of each digit in the run of each invocation."""
    threads = tile.digits
    own = shared(tile.counts, "int32")
    with I.serial(0, tile.digits) as d:
        put(own, d * threads + tx, 0)
    _each_of_run(tile, block, tx, source.shape[1], lambda at: add(own, digit(source[row, at]) * threads + tx, 1))
    barrier()
    return own


def _count(
    tile: SortTile, source: Buffer, counts: Buffer, digit: Callable[[Expr], Expr], block: Expr, row: Expr, tx: Expr
) -> None:
    """counts[row, digit, block]; invocation d sums digit d."""
    own, total = _own_counts(tile, source, digit, block, row, tx), local(1, "int32")
    put(total, 0, 0)
    with I.serial(0, tile.digits) as t:
        add(total, 0, own[tx * tile.digits + t])
    put(counts, (row, tx, block), total[0])


def _prefix_sums(tile: SortTile, counts: Buffer, row: Expr, tx: Expr, blocks: int) -> None:
    """counts[row] become exclusive prefix sums, digit by digit and block by block."""
    share = -(-tile.digits * blocks // _SCAN_THREADS)
    sums, total = shared(_SCAN_THREADS, "int32"), local(2, "int32")

    def each(do: Callable[[Expr, Expr], None]) -> None:
        with I.serial(0, share) as i:
            at = keep(tx * share + i)
            with I.If(at < tile.digits * blocks), I.Then():
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
    tile: SortTile,
    source: tuple[Buffer, Buffer],
    target: tuple[Buffer, Buffer],
    counts: Buffer,
    digit: Callable[[Expr], Expr],
    block: Expr,
    row: Expr,
    tx: Expr,
) -> None:
    """Move elements to their positions in this pass's order; equal digits keep their order."""
    threads = tile.digits
    own, position = _own_counts(tile, source[0], digit, block, row, tx), local(2, "int32")
    put(position, 0, counts[row, tx, block])
    with I.serial(0, threads) as t:
        put(position, 1, own[tx * threads + t])
        put(own, tx * threads + t, position[0])
        add(position, 0, position[1])
    barrier()

    def move(at: Expr) -> None:
        prob = keep(source[0][row, at])
        slot = keep(digit(prob) * threads + tx)
        to = keep(own[slot])
        put(own, slot, to + 1)
        put(target[0], (row, to), prob)
        put(target[1], (row, to), source[1][row, at])

    _each_of_run(tile, block, tx, source[0].shape[1], move)
