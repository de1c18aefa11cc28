"""SPIR-V types and constants for TensorIR's dtypes, with the capabilities that they need."""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from mlcpipe.compiler.backends.spirv.module import Module
from mlcpipe.compiler.backends.spirv.opcodes import Capability, Op

_MAX_LANES = 4  # of a SPIR-V vector


class Unsupported(Exception):
    """A construct that SPIR-V cannot express. `compile_kernel` adds the kernel's name."""


class DType(NamedTuple):
    """kind: float, int, uint or bool (1 bit)."""

    kind: str
    bits: int
    lanes: int = 1

    @property
    def scalar(self) -> DType:
        return self if self.lanes == 1 else DType(self.kind, self.bits)

    def vector(self, lanes: int) -> DType:
        return DType(self.kind, self.bits, lanes)

    @property
    def nbytes(self) -> int:
        """Size of an element in memory. A bool takes one byte."""
        return max(1, self.bits // 8) * self.lanes

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    def __str__(self) -> str:
        lanes = f"x{self.lanes}" if self.lanes > 1 else ""
        return f"{self.kind}{lanes}" if self.kind == "bool" else f"{self.kind}{self.bits}{lanes}"


BOOL = DType("bool", 1)
INT32 = DType("int", 32)
UINT32 = DType("uint", 32)
UINT8 = DType("uint", 8)
INT64 = DType("int", 64)
UINT64 = DType("uint", 64)
FLOAT32 = DType("float", 32)


_SIZES = {("int", 8), ("int", 16), ("int", 32), ("int", 64), ("float", 16), ("float", 32), ("float", 64)}


@lru_cache(maxsize=256)
def parse(text: str) -> DType:
    """A dtype as TVM writes it."""
    match = re.fullmatch(r"(float|int|uint|bool)(\d*)(?:x(\d+))?", text)
    if not match or (match[1] == "bool") != (not match[2]):
        raise Unsupported(f"dtype {text}")
    kind, bits = match[1], int(match[2] or 1)
    if kind != "bool" and ("float" if kind == "float" else "int", bits) not in _SIZES:
        raise Unsupported(f"dtype {text}")
    return DType(kind, bits, int(match[3] or 1))


@lru_cache(maxsize=64)
def chunks(lanes: int) -> tuple[int, ...]:
    """How a vector of TensorIR is divided into SPIR-V vectors of at most 4 lanes."""
    whole, rest = divmod(lanes, _MAX_LANES)
    return (_MAX_LANES,) * whole + ((rest,) if rest else ())


# (kind, bits) -> the capability to declare a type, or to compute with it.
_DECLARED = {("float", 64): Capability.Float64, ("int", 64): Capability.Int64, ("uint", 64): Capability.Int64}
_COMPUTED = {
    ("float", 16): Capability.Float16,
    ("int", 16): Capability.Int16,
    ("uint", 16): Capability.Int16,
    ("int", 8): Capability.Int8,
    ("uint", 8): Capability.Int8,
}
_STORED = {8: Capability.StorageBuffer8BitAccess, 16: Capability.StorageBuffer16BitAccess}


def integer(expr: Any) -> int | None:
    """The value of an integer literal; None for other expressions."""
    return int(expr.value) if type(expr).__name__ == "IntImm" else None


def dtype_of(expr: Any) -> DType:
    """The dtype that TVM gave an expression."""
    dtype = getattr(expr.ty, "dtype", None)
    if dtype is None:
        raise Unsupported(f"a value of type {expr.ty}")
    return parse(str(dtype))


def void(expr: Any) -> bool:
    """Whether an expression has no value."""
    return str(getattr(expr.ty, "dtype", "void")) in ("void", "handle", "")


class Types:
    """Types and constants of a module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._ids: dict[DType, int] = {}
        self._constants: dict[tuple[DType, int | float | str], int] = {}

    def id(self, dtype: DType, computed: bool = True) -> int:
        """The id of a type of at most 4 lanes. Without `computed`, code only loads, stores and converts its values."""
        if computed and dtype.bits < 32 and dtype.kind != "bool":
            self.module.capabilities.add(_COMPUTED[dtype.kind, dtype.bits])
        type_id = self._ids.get(dtype)
        if type_id is None:
            type_id = self._ids[dtype] = self._declare(dtype)
        return type_id

    def _declare(self, dtype: DType) -> int:
        if dtype.lanes > 1:
            return self.module.declare(Op.TypeVector, self.id(dtype.scalar, computed=False), dtype.lanes)
        if dtype.kind == "bool":
            return self.module.declare(Op.TypeBool)
        capability = _DECLARED.get((dtype.kind, dtype.bits))
        if capability is not None:
            self.module.capabilities.add(capability)
        if dtype.kind == "float":
            return self.module.declare(Op.TypeFloat, dtype.bits)
        return self.module.declare(Op.TypeInt, dtype.bits, int(dtype.kind == "int"))

    def finish(self) -> None:
        """Add the capability to compute with narrow types that no buffer has: it also allows their declaration."""
        capabilities = self.module.capabilities
        for bits, stored in _STORED.items():
            if stored not in capabilities:
                narrow = {(dtype.kind, dtype.bits) for dtype in self._ids if dtype.bits == bits}
                capabilities |= {_COMPUTED[key] for key in narrow}

    def constant(self, dtype: DType, value: int | float) -> int:
        """The id of a constant of at most 4 lanes, each `value`."""
        key = (dtype, repr(value) if isinstance(value, float) else value)  # 0.0 == -0.0, NaN != NaN
        constant = self._constants.get(key)
        if constant is None:
            constant = self._constants[key] = self._make_constant(dtype, value)
        return constant

    def _make_constant(self, dtype: DType, value: int | float) -> int:
        type_id = self.id(dtype)
        if dtype.lanes > 1:
            part = self.constant(dtype.scalar, value)
            return self.module.constant(Op.ConstantComposite, type_id, *[part] * dtype.lanes)
        if dtype.kind == "bool":
            return self.module.constant(Op.ConstantTrue if value else Op.ConstantFalse, type_id)
        return self.module.constant(Op.Constant, type_id, *literal(dtype, value))


def literal(dtype: DType, value: int | float) -> tuple[int, ...]:
    """The words of a number: narrow signed integers are sign-extended, narrow floats zero-extended (2.2.1)."""
    if dtype.kind == "float":
        return _float_words(dtype.bits, float(value))
    number = int(value) & ((1 << dtype.bits) - 1)
    if dtype.kind == "int" and dtype.bits < 32 and number >> (dtype.bits - 1):
        number -= 1 << dtype.bits
    if dtype.bits == 64:
        return number & 0xFFFFFFFF, number >> 32
    return (number & 0xFFFFFFFF,)


def _float_words(bits: int, value: float) -> tuple[int, ...]:
    codes = {16: "e", 32: "f", 64: "d"}
    try:
        raw = struct.pack("<" + codes[bits], value)
    except OverflowError:  # beyond the dtype's largest number
        raw = struct.pack("<" + codes[bits], float("inf") if value > 0 else float("-inf"))
    raw += b"\0" * (-len(raw) % 4)
    return struct.unpack(f"<{len(raw) // 4}I", raw)
