"""PrimFuncs written with TVM's IR builder: Python functions emit statements, Python loops unroll them.

`cpu/vectors.py` adds vectors and `gpu/kernel.py` adds workgroups. TVMScript needed 3 s to parse the kernels of one
KV cache; the builder needs milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as I

from tir_schedules.sampling import Signature

Buffer = Any  # tvm.tirx.Buffer: indexing one gives an expression
Expr = Any  # tvm.tirx.PrimExpr, or an int

P = ParamSpec("P")
T = TypeVar("T")
_KEPT = 64


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """Keep some of the functions that `make` made: layers share them, and a process may compile many models."""
    return cast(Callable[P, T], lru_cache(_KEPT)(make))


@dataclass(frozen=True)
class Tensor:
    """A tensor argument. A slice of a larger buffer has an `offset`.

    The kernel's body gets `wrap(*views)`, where each of `views` is the same memory as a vector of (elements, dtype).
    Without views it gets `wrap(buffer)`.
    """

    shape: Sequence[Expr]
    dtype: str
    views: Sequence[tuple[Expr, str]] = ()
    wrap: Callable[..., Any] = lambda view: view
    offset: bool = False


Argument = Tensor | str  # a str is the dtype of a scalar


def function(name: str, arguments: Mapping[str, Argument], body: Callable[..., None]) -> tirx.PrimFunc:
    """The scheduled PrimFunc with these arguments and the statements that `body(argument, ...)` emits."""
    with IRBuilder() as builder, I.prim_func(s_tir=True):
        I.func_name(name)
        # The builder needs all arguments first, then their buffers, then views of them.
        raw = [I.arg(key, tirx.Var(key, a) if isinstance(a, str) else I.handle()) for key, a in arguments.items()]
        buffers = [x if isinstance(a, str) else _match(x, key, a) for x, (key, a) in zip(raw, arguments.items())]
        body(*(x if isinstance(a, str) else _view(x, a) for x, a in zip(buffers, arguments.values())))
    return builder.get().with_attr({"tirx.is_scheduled": True, "tirx.noalias": True})


def function_of(signature: Signature, sizes: Mapping[str, int], body: Callable[..., None]) -> tirx.PrimFunc:
    """The PrimFunc with a signature's inputs and outputs; symbols without a size are int64 variables."""
    tensors = (*signature.inputs, *signature.outputs)
    symbols = {d for tensor in tensors for d in tensor.shape if isinstance(d, str)}
    dims = {symbol: sizes.get(symbol) or tirx.Var(symbol, "int64") for symbol in symbols}
    arguments = {t.name: Tensor([dims[d] if isinstance(d, str) else d for d in t.shape], t.dtype) for t in tensors}
    return function(signature.name, arguments, body)


def _match(handle: Expr, name: str, tensor: Tensor) -> Buffer:
    offset = {"elem_offset": tirx.Var(f"{name}_offset", "int32")} if tensor.offset else {}
    return I.match_buffer(handle, tuple(tensor.shape), tensor.dtype, **offset)


def _view(buffer: Buffer, tensor: Tensor) -> Any:
    if not tensor.views:
        return tensor.wrap(buffer)
    return tensor.wrap(*[I.decl_buffer((n,), dtype, data=buffer.data, elem_offset=0) for n, dtype in tensor.views])


def to(value: Expr, dtype: str) -> Expr:
    """A value in a dtype; a vector keeps its lanes."""
    if isinstance(value, (int, float)):
        return tirx.const(value, dtype)
    found = str(value.ty.dtype)
    base, separator, lanes = found.partition("x")
    return value if dtype in (found, base) else I.cast(value, dtype + separator + lanes)


def f32(value: Expr) -> Expr:
    """A value as float32."""
    return to(value, "float32")


def overflowed(value: Expr) -> Expr:
    """Whether a float32 is NaN or infinity (minus infinity is not), by its bits: shader compilers may assume that
    there are none, and then comparisons may have any result.
    """
    bits = I.reinterpret("int32", value)
    return I.bitwise_and(bits, 0x7FFFFFFF) + I.shift_right(bits, 31) >= 0x7F800000  # the second term: 0, or -1 below 0


def put(buffer: Buffer, index: Expr | Sequence[Expr], value: Expr) -> None:
    """buffer[index] = value, in the buffer's dtype; a vector where the index is a ramp."""
    I.buffer_store(buffer, to(value, str(buffer.dtype)), index if isinstance(index, (list, tuple)) else [index])


def add(buffer: Buffer, index: Expr, value: Expr) -> None:
    """buffer[index] += value."""
    put(buffer, index, buffer[index] + value)
