"""RMS norm, with or without the residual addition before it: a workgroup a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu import device_calls
from tir_schedules.gpu.kernel import (
    Buffer,
    Expr,
    Tensor,
    add,
    barrier,
    ceildiv,
    f32,
    function,
    launch,
    local,
    put,
    shared,
)
from tir_schedules.gpu.octets import OCTET
from tir_schedules.op import Declined, Op


def norm(op: Op, dtype: str, knobs: Mapping[str, int | str]) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `rms_norm` or `add_rms_norm`, in float32 inside."""
    size, eps = op.int("size"), float(op.facts["eps"])
    m, lanes = tirx.Var("m", "int64"), int(knobs.get("subgroup", 0))
    one, many = norm_threads(size, knobs, ".one"), norm_threads(size, knobs, ".many")
    row = Tensor((m, size), dtype)
    weight = Tensor((size,), op.str("weight_dtype"))

    def scale_row(
        threads: int, i: Expr, tx: Expr, x: Buffer, w: Buffer, y: Buffer, read: Callable[[Expr], Expr]
    ) -> None:
        total = local(1)
        put(total, 0, I.float32(0))

        def each(body: Callable[[Expr], None]) -> None:
            with I.serial(0, ceildiv(size, threads)) as step:
                at = step * threads + tx
                if size % threads == 0:
                    body(at)
                else:
                    with I.If(at < size), I.Then():
                        body(at)

        def square(at: Expr) -> None:
            value = read(at)
            add(total, 0, value * value)

        each(square)
        if lanes:
            _sum_of_subgroups(total, threads // lanes, lanes)
        else:
            _sum_of_all(total, tx, threads)
        put(total, 0, I.rsqrt(total[0] * I.float32(1 / size) + I.float32(eps)))
        each(lambda at: put(y, (i, at), f32(x[i, at]) * total[0] * f32(w[at])))

    def by_rows(kernel: Callable[[int], None]) -> None:
        """kernel(threads), with those of one row and those of many."""
        if one == many:
            kernel(one)
            return
        with I.If(m == 1):
            with I.Then():
                kernel(one)
            with I.Else():
                kernel(many)

    def plain(x: Buffer, w: Buffer, y: Buffer) -> None:
        def kernel(threads: int) -> None:
            with launch(threads, m) as (i, _, tx):
                scale_row(threads, i, tx, x, w, y, lambda at: f32(x[i, at]))

        by_rows(kernel)

    def with_sum(a: Buffer, b: Buffer, w: Buffer, x: Buffer, y: Buffer) -> None:
        def kernel(threads: int) -> None:
            with launch(threads, m) as (i, _, tx):

                def read(at: Expr) -> Expr:
                    put(x, (i, at), a[i, at] + b[i, at])
                    return f32(x[i, at])

                scale_row(threads, i, tx, x, w, y, read)

        by_rows(kernel)

    if op.kind == "rms_norm":
        return function("rms_norm", {"x": row, "weight": weight, "y": row}, plain)
    return function("add_rms_norm", {"a": row, "b": row, "weight": weight, "x": row, "y": row}, with_sum)


def norm_threads(size: int, knobs: Mapping[str, int | str], rows: str) -> int:
    """Invocations of a workgroup, for one row (".one") or for many (".many"): no more than short rows have use for."""
    threads, least = int(knobs.get(f"norm_threads{rows}", knobs["norm_threads"])), int(knobs.get("subgroup", 0))
    while threads > max(16, least) and threads >= 2 * size:
        threads //= 2
    return threads


def _sum_of_all(total: Buffer, tx: Expr, threads: int) -> None:
    """Every invocation adds up all sums: one barrier, which costs software adapters more than the loads."""
    squares = shared(threads)
    put(squares, tx, total[0])
    barrier()
    put(total, 0, I.float32(0))
    for other in range(threads):
        add(total, 0, squares[other])


def _sum_of_subgroups(total: Buffer, count: int, lanes: int) -> None:
    """As above, of full subgroups."""
    I.evaluate(device_calls.require_size(lanes))
    put(total, 0, device_calls.subgroup_add(total[0], OCTET if lanes == OCTET else 0))
    if count == 1:
        return
    sums = shared(count)
    with I.If(device_calls.lane() == 0), I.Then():
        put(sums, device_calls.subgroup_id(), total[0])
    barrier()
    put(total, 0, I.float32(0))
    for other in range(count):
        add(total, 0, sums[other])
