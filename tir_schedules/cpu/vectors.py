"""PrimFuncs written with TVM's IR builder: Python functions emit statements, Python loops unroll them.

Kernels whose register tiles follow from facts of the model are shorter this way than as TVMScript, and are built
in milliseconds: TVMScript's parser took 3 s for those of one KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as I

Buffer = Any  # tvm.tirx.Buffer: indexing one gives an expression
Expr = Any  # tvm.tirx.PrimExpr, or an int


@dataclass(frozen=True)
class Tensor:
    """A tensor argument. The kernel sees its memory as `views`, vectors of (elements, dtype); without any, as it is.

    What the kernel's body gets is `wrap(*views)`. Tensors that are parts of one buffer have an `offset`.
    """

    shape: Sequence[Expr]
    dtype: str
    views: Sequence[tuple[Expr, str]] = ()
    wrap: Callable[..., Any] = lambda view: view
    offset: bool = False


Argument = Tensor | str  # a str is the dtype of a number


def function(name: str, arguments: Mapping[str, Argument], body: Callable[..., None]) -> tirx.PrimFunc:
    """The PrimFunc with these arguments and the statements that `body(argument, ...)` emits."""
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name(name)
        # The builder wants all arguments first, then what they are, then views of them.
        raw = [I.arg(key, tirx.Var(key, a) if isinstance(a, str) else I.handle()) for key, a in arguments.items()]
        buffers = [x if isinstance(a, str) else _match(x, key, a) for x, (key, a) in zip(raw, arguments.items())]
        body(*(x if isinstance(a, str) else _view(x, a) for x, a in zip(buffers, arguments.values())))
    return builder.get()


def _match(handle: Expr, name: str, tensor: Tensor) -> Buffer:
    offset = {"elem_offset": tirx.Var(f"{name}_offset", "int32")} if tensor.offset else {}
    return I.match_buffer(handle, tuple(tensor.shape), tensor.dtype, **offset)


def _view(buffer: Buffer, tensor: Tensor) -> Any:
    if not tensor.views:
        return tensor.wrap(buffer)
    return tensor.wrap(*[I.decl_buffer((n,), dtype, data=buffer.data, elem_offset=0) for n, dtype in tensor.views])


def scratch(size: Expr, dtype: str = "float32") -> Buffer:
    """Memory of this thread; below 1 KiB it is on the stack, and LLVM keeps constant indices in registers."""
    return I.alloc_buffer((size,), dtype)


def lanes_of(dtype: str, lanes: int) -> str:
    """The dtype of a vector; one lane is a scalar."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def read(buffer: Buffer, index: Expr, lanes: int) -> Expr:
    """buffer[index : index + lanes] as it is stored."""
    return buffer[index] if lanes == 1 else buffer[I.ramp(index, 1, lanes)]


def load(buffer: Buffer, index: Expr, lanes: int) -> Expr:
    """buffer[index : index + lanes] as float32."""
    value, dtype = read(buffer, index, lanes), str(buffer.dtype)
    if dtype == "float32":
        return value
    if dtype == "int8":  # the conversion in two steps is two instructions; LLVM's own goes through more
        value = I.cast(value, lanes_of("int32", lanes))
    return I.cast(value, lanes_of("float32", lanes))


def store(buffer: Buffer, index: Expr, value: Expr, lanes: int) -> None:
    """buffer[index : index + lanes] = value."""
    I.buffer_store(buffer, value, [index if lanes == 1 else I.ramp(index, 1, lanes)])


def put(buffer: Buffer, index: Expr, value: Expr) -> None:
    """buffer[index] = value."""
    I.buffer_store(buffer, value, [index])


def splat(value: Expr, lanes: int) -> Expr:
    """A scalar in all lanes; Python numbers become float32."""
    scalar = I.float32(value) if isinstance(value, (int, float)) else value
    return scalar if lanes == 1 else I.broadcast(scalar, lanes)


def value(expr: Expr) -> Expr:
    """Compute an expression once, here.

    Whole numbers and conditions go through memory that LLVM makes a register: TVM would look through a binding at
    every use, and a chain of a few took it half a minute.
    """
    dtype = str(expr.ty.dtype)
    if dtype not in ("int32", "int64", "bool"):
        return I.bind(expr)
    kept = scratch(1, "int32" if dtype == "bool" else dtype)
    put(kept, 0, I.cast(expr, "int32") if dtype == "bool" else expr)
    return kept[0] != 0 if dtype == "bool" else kept[0]


def prefetch(buffer: Buffer, index: Expr | tuple[Expr, ...]) -> None:
    """Ask for the cache line of buffer[index]; any address is allowed."""
    intrinsic = I.llvm_lookup_intrinsic_id("llvm.prefetch")
    read_only, keep, data = I.int32(0), I.int32(3), I.int32(1)
    I.evaluate(I.call_llvm_intrin(intrinsic, I.address_of(buffer[index]), read_only, keep, data, dtype="void"))


# 2**f on [-0.5, 0.5] with f**0 = 1: relative error 1.6e-7 in float32 (weighted least squares on Chebyshev nodes).
_POWER = (0.6931469775965878, 0.2402224208184093, 0.05550733745645828, 0.009671512862321024, 0.0013264727080347025)


def exp2(x: Expr, lanes: int) -> Expr:
    """2**x for x <= 126, relative error 2e-7; below 2**-126: less than 2**-125."""
    low = value(I.max(x, splat(-126.0, lanes)))
    whole = value(I.nearbyint(low))
    f = value(low - whole)
    power = splat(_POWER[-1], lanes)
    for c in (*_POWER[-2::-1], 1.0):
        power = power * f + splat(c, lanes)
    integer = lanes_of("int32", lanes)
    exponent = I.shift_left(I.cast(whole, integer), splat(I.int32(23), lanes))
    return I.reinterpret(lanes_of("float32", lanes), I.reinterpret(integer, power) + exponent)


def largest(x: Expr, lanes: int) -> Expr:
    """The largest lane of a float32 vector without NaN.

    LLVM reduces floats lane after lane with a test for NaN at each, and integers in halves: so their bits are
    compared as integers, where those of negative numbers are turned round.
    """

    def ordered(bits: Expr, size: int) -> Expr:
        sign = I.shift_right(bits, splat(I.int32(31), size))
        return I.bitwise_xor(bits, I.bitwise_and(sign, splat(I.int32(0x7FFFFFFF), size)))

    bits = value(I.reinterpret(lanes_of("int32", lanes), x))
    reduce_max = I.llvm_lookup_intrinsic_id("llvm.vector.reduce.smax")
    top = value(I.call_llvm_pure_intrin(reduce_max, ordered(bits, lanes), dtype="int32"))
    return I.reinterpret("float32", ordered(top, 1))


def total(buffer: Buffer, index: Expr, lanes: int) -> Expr:
    """The sum of buffer[index : index + lanes]."""
    acc = scratch(1)
    put(acc, 0, buffer[index])
    with I.serial(1, lanes) as i:
        put(acc, 0, acc[0] + buffer[index + i])
    return acc[0]
