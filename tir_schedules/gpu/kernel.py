"""PrimFuncs for GPUs written with TVM's IR builder: one function launches one kernel or several in a row.

TVM's WGSL generator sets the bounds: at most ten storage buffers a kernel, no `blockIdx.z` (the runtime folds grids
of more than 65535 workgroups into it), no 64-bit numbers, no atomics, loads of one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as I

Buffer = Any  # tvm.tirx.Buffer: indexing one gives an expression
Expr = Any  # tvm.tirx.PrimExpr, or an int

LOWEST = -3.0e38  # stands for minus infinity, which WGSL lacks


@dataclass(frozen=True)
class Tensor:
    """A tensor argument. Tensors that are parts of one buffer have an `offset`."""

    shape: Sequence[Expr]
    dtype: str
    offset: bool = False


Argument = Tensor | str  # a str is the dtype of a number


def function(name: str, arguments: Mapping[str, Argument], body: Callable[..., None]) -> tirx.PrimFunc:
    """The PrimFunc with these arguments and the statements that `body(argument, ...)` emits."""
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name(name)
        raw = [I.arg(key, tirx.Var(key, a) if isinstance(a, str) else I.handle()) for key, a in arguments.items()]
        body(*(x if isinstance(a, str) else _match(x, key, a) for x, (key, a) in zip(raw, arguments.items())))
    return builder.get().with_attr({"tirx.is_scheduled": True, "tirx.noalias": True})


def _match(handle: Expr, name: str, tensor: Tensor) -> Buffer:
    offset = {"elem_offset": tirx.Var(f"{name}_offset", "int32")} if tensor.offset else {}
    return I.match_buffer(handle, tuple(tensor.shape), tensor.dtype, **offset)


@contextmanager
def launch(threads: int, x: Expr, y: Expr = 1) -> Iterator[tuple[Expr, Expr, Expr]]:
    """One kernel of workgroups (x, y), each of `threads` invocations: the three indices, int32."""
    with (
        I.launch_thread("blockIdx.x", _int32(x)) as bx,
        I.launch_thread("blockIdx.y", _int32(y)) as by,
        I.launch_thread("threadIdx.x", threads) as tx,
    ):
        yield bx, by, tx


def _int32(x: Expr) -> Expr:
    return x if isinstance(x, int) else I.cast(x, "int32")


def ceildiv(a: Expr, b: int) -> Expr:
    """a / b, rounded up."""
    return (a + (b - 1)) // b


def local(size: int, dtype: str = "float32") -> Buffer:
    """Memory of one invocation: registers, where every index is a number."""
    return I.alloc_buffer((size,), dtype, scope="local")


def shared(size: int, dtype: str = "float32") -> Buffer:
    """Memory of the workgroup."""
    return I.alloc_buffer((size,), dtype, scope="shared")


def workspace(shape: Sequence[Expr], dtype: str) -> Buffer:
    """Memory of the device between the kernels of one function."""
    return I.alloc_buffer(tuple(shape), dtype)


def put(buffer: Buffer, index: Expr | Sequence[Expr], value: Expr) -> None:
    """buffer[index] = value, in the buffer's dtype."""
    I.buffer_store(buffer, to(value, str(buffer.dtype)), index if isinstance(index, (list, tuple)) else [index])


def add(buffer: Buffer, index: Expr, value: Expr) -> None:
    """buffer[index] += value."""
    put(buffer, index, buffer[index] + value)


def to(value: Expr, dtype: str) -> Expr:
    """A value in a dtype."""
    if isinstance(value, (int, float)):
        return tirx.const(value, dtype)
    return value if str(value.ty.dtype) == dtype else I.cast(value, dtype)


def f32(value: Expr) -> Expr:
    """A value as float32."""
    return to(value, "float32")


def half_to_float(half: Expr, signed: bool) -> Expr:
    """The number that 16 bits, an int32, are as float16 (IEEE 754 binary16), without float16 arithmetic or a branch.

    Numbers below 2**-14 are integers times 2**-24: they get the exponent of 2**-14 and lose it by a subtraction, since
    their bits in place would be subnormal, which GPUs may clear.
    """
    size = I.bitwise_and(half, 0x7FFF) if signed else half
    small = I.shift_right(size - 0x400, 31)  # -1 below 2**-14, 0 above
    bits = I.shift_left(size, 13) + (112 << 23) - I.shift_left(small, 23)
    value = I.reinterpret("float32", bits) + f32(small) * I.float32(2.0**-14)
    return value * f32(1 - 2 * I.shift_right(half, 15)) if signed else value


def keep(expr: Expr) -> Expr:
    """Compute an expression once, here."""
    return I.bind(expr)


def pin(expr: Expr) -> Expr:
    """Compute an expression once, in a variable: TVM writes bindings without loads out wherever they are used."""
    variable = local(1, str(expr.ty.dtype))
    put(variable, 0, expr)
    return variable[0]


def barrier() -> None:
    """All invocations of the workgroup have come here, and see what the others stored in shared memory."""
    I.evaluate(I.tvm_storage_sync("shared"))


def reduced(scratch: Buffer, tx: Expr, threads: int, value: Expr, combine: Callable[[Expr, Expr], Expr]) -> Expr:
    """`value` of all invocations, combined: the same for all of them. `scratch`: threads + 16 shared numbers.

    Two barriers and steps of 16, not eight barriers and steps of two. A barrier stands at the beginning, so that the
    scratch of one reduction serves the next. Loops, not what they unroll to: software adapters compile every load of
    shared memory to a hundred instructions.
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
