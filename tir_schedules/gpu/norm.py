"""RMS and layer norm, with or without the residual addition before them: one workgroup for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, Tensor, add, f32, function, put
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import barrier, by_rows, ceildiv, launch, local, shared
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, with_output_dtype


def norm(op: Op, dtype: str, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The kernel of a tagged norm; arithmetic is float32."""
    size, m = op.int("size"), tirx.Var("m", "int64")
    row_norm = _RowNorm(size, float(op.facts["eps"]), int(knobs.get("subgroup", 0)), "layer" in op.kind)
    one, many = norm_threads(size, knobs, ".one"), norm_threads(size, knobs, ".many")
    row = Tensor((m, size), dtype)
    weight = Tensor((size,), op.str("weight_dtype"))
    vectors = dict.fromkeys(("weight", "bias")[: 1 + bool(op.facts.get("biased"))], weight)

    def with_threads(kernel: Callable[[int], None]) -> None:
        """kernel(threads), with the threads for few rows or those for many."""
        if one == many:
            kernel(one)
            return
        by_rows(op, m, lambda: kernel(one), lambda: kernel(many))

    def plain(x: Buffer, *others: Buffer) -> None:
        *of_columns, y = others

        def kernel(threads: int) -> None:
            with launch(threads, m) as (i, _, tx):
                row_norm.run(threads, i, tx, (x, of_columns, y), lambda at: f32(x[i, at]))

        with_threads(kernel)

    def with_sum(a: Buffer, b: Buffer, *others: Buffer) -> None:
        *of_columns, x, y = others

        def kernel(threads: int) -> None:
            with launch(threads, m) as (i, _, tx):

                def read(at: Expr) -> Expr:
                    put(x, (i, at), a[i, at] + b[i, at])
                    return f32(x[i, at])

                row_norm.run(threads, i, tx, (x, of_columns, y), read)

        with_threads(kernel)

    if not op.kind.startswith("add"):
        return function(op.kind, {"x": row, **vectors, "y": row}, plain)
    return function(op.kind, {"a": row, "b": row, **vectors, "x": row, "y": row}, with_sum)


@dataclass(frozen=True)
class _RowNorm:
    """RMS norm, or `layer` norm, of one row by one workgroup. `lanes` of a subgroup; 0: unknown."""

    size: int
    eps: float
    lanes: int
    layer: bool

    def run(
        self,
        threads: int,
        i: Expr,
        tx: Expr,
        tensors: tuple[Buffer, Sequence[Buffer], Buffer],
        read: Callable[[Expr], Expr],
    ) -> None:
        """y[i] = x[i] / rms(x[i]) * w, or (x[i] - mean) / deviation * w + bias, for `tensors` x, (w, bias), y.

        `read` gives the elements of x[i] and may store them.
        """
        x, (w, *bias), y = tensors
        centred = read
        if self.layer:
            mean = self._sum(threads, tx, read)
            put(mean, 0, mean[0] * I.float32(1 / self.size))

            def centred(at: Expr) -> Expr:
                return f32(x[i, at]) - mean[0]

        def square(at: Expr) -> Expr:
            value = centred(at)
            return value * value

        total = self._sum(threads, tx, square)
        put(total, 0, I.rsqrt(total[0] * I.float32(1 / self.size) + I.float32(self.eps)))

        def normalize(at: Expr) -> None:
            value = (centred(at) if self.layer else f32(x[i, at])) * total[0] * f32(w[at])
            put(y, (i, at), value + f32(bias[0][at]) if bias else value)

        self._each(threads, tx, normalize)

    def _sum(self, threads: int, tx: Expr, term: Callable[[Expr], Expr]) -> Buffer:
        """One number, which every invocation gets: the sum of term(at) over the row."""
        total = local(1)
        put(total, 0, I.float32(0))
        self._each(threads, tx, lambda at: add(total, 0, term(at)))
        if self.lanes:
            _sum_of_subgroups(total, threads // self.lanes, self.lanes)
        else:
            _sum_of_all(total, tx, threads)
        return total

    def _each(self, threads: int, tx: Expr, body: Callable[[Expr], None]) -> None:
        """body(at) for the elements of one invocation."""
        with I.serial(0, ceildiv(self.size, threads)) as step:
            at = step * threads + tx
            if self.size % threads == 0:
                body(at)
            else:
                with I.If(at < self.size), I.Then():
                    body(at)


def norm_threads(size: int, knobs: Knobs, rows: str) -> int:
    """Invocations of a workgroup for one row (".one") or many (".many"), fewer for short rows."""
    threads, min_threads = int(knobs.get(f"norm_threads{rows}", knobs["norm_threads"])), int(knobs.get("subgroup", 0))
    while threads > max(16, min_threads) and threads >= 2 * size:
        threads //= 2
    return threads


def _sum_of_all(total: Buffer, tx: Expr, threads: int) -> None:
    """Every invocation adds up all sums: one barrier. A barrier costs software adapters more than the loads."""
    squares = shared(threads)
    put(squares, tx, total[0])
    barrier()
    put(total, 0, I.float32(0))
    for other in range(threads):
        add(total, 0, squares[other])


def _sum_of_subgroups(total: Buffer, count: int, lanes: int) -> None:
    """The same, with full subgroups of `lanes`."""
    I.evaluate(device_calls.require_size(lanes))
    put(total, 0, device_calls.subgroup_add(total[0], GROUP_LANES if lanes == GROUP_LANES else 0))
    if count == 1:
        return
    sums = shared(count)
    with I.If(device_calls.lane() == 0), I.Then():
        put(sums, device_calls.subgroup_id(), total[0])
    barrier()
    put(total, 0, I.float32(0))
    for other in range(count):
        add(total, 0, sums[other])


_KINDS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
RULES = (NamedRule("gpu.norm", _KINDS, with_output_dtype(norm)),)
