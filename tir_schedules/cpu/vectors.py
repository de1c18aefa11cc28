"""Vectors for kernels of CPUs that are written with `tir_schedules/builder.py`."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put


def scratch(size: Expr, dtype: str = "float32") -> Buffer:
    """Memory of this thread; below 1 KiB it is on the stack, and LLVM keeps constant indices in registers."""
    return I.alloc_buffer((size,), dtype)


def lanes_of(dtype: str, lanes: int) -> str:
    """The dtype of a vector; one lane is a scalar."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


Index = Any  # an Expr, or a tuple with one for each dimension


class Registers:
    """`count` vectors of `lanes` numbers in scratch: `v[i]` is the i-th, `v[i] = x` emits a store.

    Below 1 KiB they are on the stack, and LLVM keeps those with constant indices in registers.
    """

    def __init__(self, count: int, lanes: int, dtype: str = "float32") -> None:
        self.lanes = lanes
        self.memory = I.alloc_buffer((count, lanes), dtype)

    def __getitem__(self, i: Expr) -> Expr:
        return read(self.memory, (i, 0), self.lanes)

    def __setitem__(self, i: Expr, value: Expr) -> None:
        store(self.memory, (i, 0), value, self.lanes)


def _span(index: Index, lanes: int) -> list[Expr]:
    """Indices of `lanes` neighbors along the last dimension."""
    *outer, first = index if isinstance(index, tuple) else (index,)
    return [*outer, first if lanes == 1 else I.ramp(first, 1, lanes)]


def read(buffer: Buffer, index: Index, lanes: int) -> Expr:
    """`lanes` numbers from buffer[index] on, as they are stored."""
    return buffer[tuple(_span(index, lanes))]


def load(buffer: Buffer, index: Index, lanes: int) -> Expr:
    """`lanes` numbers from buffer[index] on, as float32."""
    value, dtype = read(buffer, index, lanes), str(buffer.dtype)
    if dtype == "float32":
        return value
    if dtype == "int8":  # the conversion in two steps is two instructions; LLVM's own goes through more
        value = I.cast(value, lanes_of("int32", lanes))
    return I.cast(value, lanes_of("float32", lanes))


def load_packed(buffer: Buffer, index: Index, lanes: int, packed: int) -> list[Expr]:
    """[`load`]; of int8 that hold `packed` = 2 codes of 4 bits, the lower ones and the upper ones as float32."""
    if packed == 1:
        return [load(buffer, index, lanes)]
    both = value(I.cast(read(buffer, index, lanes), lanes_of("int32", lanes)))
    up, down = (splat(I.int32(bits), lanes) for bits in (28, 4))
    codes = I.shift_right(I.shift_left(both, up), up), I.shift_right(both, down)
    return [I.cast(code, lanes_of("float32", lanes)) for code in codes]


def store(buffer: Buffer, index: Index, value: Expr, lanes: int) -> None:
    """buffer[index], buffer[index + 1], ... = the `lanes` numbers of `value`."""
    I.buffer_store(buffer, value, _span(index, lanes))


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


def prefetch(buffer: Buffer, index: Index) -> None:
    """Ask for the cache line of buffer[index]; any address is allowed."""
    intrinsic = I.llvm_lookup_intrinsic_id("llvm.prefetch")
    read_only, keep, data = I.int32(0), I.int32(3), I.int32(1)
    I.evaluate(I.call_llvm_intrin(intrinsic, I.address_of(buffer[index]), read_only, keep, data, dtype="void"))


# 2**f on [-0.5, 0.5] with f**0 = 1: relative error 1.6e-7 in float32 (weighted least squares on Chebyshev nodes).
_POWER = (0.6931469775965878, 0.2402224208184093, 0.05550733745645828, 0.009671512862321024, 0.0013264727080347025)


def exp2(x: Expr, lanes: int) -> Expr:
    """2**x for x <= 126, relative error 2e-7; below 2**-126: less than 2**-125; NaN stays NaN."""
    low = value(I.max(splat(-126.0, lanes), x))  # max(a, b) is `a > b ? a : b`: with NaN as b, NaN
    whole = value(I.nearbyint(low))
    f = value(low - whole)
    power = splat(_POWER[-1], lanes)
    for c in (*_POWER[-2::-1], 1.0):
        power = power * f + splat(c, lanes)
    integer = lanes_of("int32", lanes)
    # The last bits of whole + 1.5 * 2**23 are those of the integer, and 0 for NaN. A cast says nothing of NaN.
    exponent = I.shift_left(I.reinterpret(integer, whole + splat(1.5 * 2**23, lanes)), splat(I.int32(23), lanes))
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


def turned(rows: list[Expr]) -> list[Expr]:
    """The columns of a square of vectors: log2(n) times, halves of the square take turns (Stone 1971)."""
    n = len(rows)
    low, high = ([i // 2 + (i % 2 * n) + first for i in range(n)] for first in (0, n // 2))
    for _ in range(n.bit_length() - 1):
        pairs = [[rows[i], rows[i + n // 2]] for i in range(n // 2)]
        rows = [value(tirx.Shuffle(pair, order)) for pair in pairs for order in (low, high)]
    return rows


def total(buffer: Buffer, index: Expr, lanes: int) -> Expr:
    """The sum of buffer[index : index + lanes]."""
    acc = scratch(1)
    put(acc, 0, buffer[index])
    with I.serial(1, lanes) as i:
        put(acc, 0, acc[0] + buffer[index + i])
    return acc[0]
