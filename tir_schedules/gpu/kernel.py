"""Workgroups for GPU kernels written with `tir_schedules/builder.py`. One PrimFunc launches one or more kernels.

TVM's WGSL generator sets the bounds: at most ten storage buffers in a kernel, no `blockIdx.z` (the runtime uses it for
grids of more than 65535 workgroups), no 64-bit numbers, no atomics, loads of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, f32, put
from tir_schedules.op import Op

# Stands for minus infinity, which WGSL lacks. A masked score is `<= LOWEST`: NaN is not, and so it is not masked.
LOWEST = -3.0e38
HIGHEST = 3.4e38  # stands for NaN and infinity as the largest of some numbers


@contextmanager
def launch(threads: int, x: Expr, y: Expr = 1) -> Iterator[tuple[Expr, Expr, Expr]]:
    """One kernel of (x, y) workgroups of `threads` invocations; yields the three indices, int32."""
    with (
        I.launch_thread("blockIdx.x", _int32(x)) as bx,
        I.launch_thread("blockIdx.y", _int32(y)) as by,
        I.launch_thread("threadIdx.x", threads) as tx,
    ):
        yield bx, by, tx


def by_rows(op: Op, m: Expr, few: Callable[[], None], many: Callable[[], None]) -> None:
    """few() or many() for m rows, as the operation's rows are; where it does not say, few() is for one."""
    if "rows" in op.facts:
        (many if op.many_rows else few)()
        return
    with I.If(m <= 1):
        with I.Then():
            few()
        with I.Else():
            many()


def _int32(x: Expr) -> Expr:
    return x if isinstance(x, int) else I.cast(x, "int32")


def ceildiv(a: Expr, b: int) -> Expr:
    """a / b, rounded up."""
    return (a + (b - 1)) // b


def ceildiv_by(a: Expr, b: Expr) -> Expr:
    """a / b, rounded up, of expressions; a >= 0, b > 0."""
    return I.truncdiv(a + (b - 1), b)


def local(size: int, dtype: str = "float32") -> Buffer:
    """Memory of one invocation: registers if every index is a constant."""
    return I.alloc_buffer((size,), dtype, scope="local")


def shared(size: int, dtype: str = "float32") -> Buffer:
    """Memory shared by a workgroup."""
    return I.alloc_buffer((size,), dtype, scope="shared")


def workspace(shape: Sequence[Expr], dtype: str) -> Buffer:
    """Device memory that the kernels of one function pass data in."""
    return I.alloc_buffer(tuple(shape), dtype)


def half_to_float(half: Expr, signed: bool, finite: bool = True) -> Expr:
    """float32 from the 16 bits of a float16 (IEEE 754 binary16) in an int32, without float16 arithmetic or a branch.

    `finite`: it is neither NaN nor infinity. Numbers below 2**-14 are integers times 2**-24. They get the exponent of
    2**-14, which a subtraction removes: as subnormal bits GPUs might flush them to zero.
    """
    size = I.bitwise_and(half, 0x7FFF) if signed else half
    small = I.shift_right(size - 0x400, 31)  # -1 below 2**-14, 0 above
    bits = I.shift_left(size, 13) + (112 << 23) - I.shift_left(small, 23)
    if not finite:
        bits = bits + I.bitwise_and(I.shift_right(0x7BFF - size, 31), 112 << 23)
    value = I.reinterpret("float32", bits) + f32(small) * I.float32(2.0**-14)
    return value * f32(1 - 2 * I.shift_right(half, 15)) if signed else value


def float_to_half(number: Expr) -> Expr:
    """The 16 bits of the nearest float16, in an int32, of a float32 from 0 to 65504."""
    bits = keep(I.reinterpret("int32", number))
    normal = I.shift_right(bits - (112 << 23) + 0xFFF + I.bitwise_and(I.shift_right(bits, 13), 1), 13)
    small = I.reinterpret("int32", number + I.float32(0.5)) - 0x3F000000
    return I.if_then_else(bits < 113 << 23, small, normal)


def nearest(number: Expr) -> Expr:
    """The nearest integer, the even one of two, as an int32, of a float32 from -128 to 2**22.

    TVM writes constants of Metal with seven digits, so that 1.5 * 2**23 would not do.
    """
    return I.reinterpret("int32", number + I.float32(2**23 + 128)) - 0x4B000080


def keep(expr: Expr) -> Expr:
    """Compute an expression once, here."""
    return I.bind(expr)


def bounded(expr: Expr) -> Expr:
    """A row or position that comes from memory, below 2**24. TVM then sees that indices made of it have 32 bits."""
    return keep(I.max(I.min(expr, 1 << 24), 0))


def pin(expr: Expr) -> Expr:
    """Compute an expression once, in a variable: TVM expands bindings without loads wherever they are used."""
    variable = local(1, str(expr.ty.dtype))
    put(variable, 0, expr)
    return variable[0]


def barrier() -> None:
    """Wait for all invocations of the workgroup; they then see each other's stores to shared memory."""
    I.evaluate(I.tvm_storage_sync("shared"))


def reduced(scratch: Buffer, tx: Expr, threads: int, value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """`value` combined over all invocations; each gets the result. `scratch` has threads + 16 shared numbers.

    Two levels of 16 with few barriers, not eight levels of two. The first barrier allows reductions to reuse `scratch`.
    Loops are not unrolled: software adapters compile each load of shared memory to a hundred instructions.
    """
    step = max(1, threads // 16)
    count = threads // step
    total, part = local(1), local(1)
    barrier()
    put(scratch, tx, value)
    barrier()
    with I.If(tx < count), I.Then():
        put(part, 0, scratch[tx * step])
        with I.serial(1, step) as i:
            put(part, 0, combine(part[0], scratch[tx * step + i]))
        put(scratch, threads + tx, part[0])
    barrier()
    put(total, 0, scratch[threads])
    with I.serial(1, count) as i:
        put(total, 0, combine(total[0], scratch[threads + i]))
    return total[0]
