"""Dtypes of TensorIR as SPIR-V types and constants, with the capabilities that they take."""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any, NamedTuple

from mlcpipe.compiler.spirv.opcodes import Capability, Op
from mlcpipe.compiler.spirv.words import Module

_MAX_LANES = 4  # of a SPIR-V vector


class Unsupported(Exception):
    """A construct that cannot be written as SPIR-V: the kernel's name is added where it is known."""


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
        """Of an element in memory. A bool takes a byte."""
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
    found = re.fullmatch(r"(float|int|uint|bool)(\d*)(?:x(\d+))?", text)
    if not found or (found[1] == "bool") != (not found[2]):
        raise Unsupported(f"dtype {text}")
    kind, bits = found[1], int(found[2] or 1)
    if kind != "bool" and ("float" if kind == "float" else "int", bits) not in _SIZES:
        raise Unsupported(f"dtype {text}")
    return DType(kind, bits, int(found[3] or 1))


@lru_cache(maxsize=64)
def chunks(lanes: int) -> tuple[int, ...]:
    """The lanes of the SPIR-V vectors, at most 4 each, that a vector of TensorIR is made of."""
    whole, rest = divmod(lanes, _MAX_LANES)
    return (_MAX_LANES,) * whole + ((rest,) if rest else ())


# (kind, bits) -> the capability without which a type cannot be declared at all, or cannot be computed with.
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
    """The number that an expression is, if it is an integer that TVM knows."""
    return int(expr.value) if type(expr).__name__ == "IntImm" else None


def dtype_of(expr: Any) -> DType:
    """The dtype that TVM gave an expression."""
    found = getattr(expr.ty, "dtype", None)
    if found is None:
        raise Unsupported(f"a value of type {expr.ty}")
    return parse(str(found))


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
        """The type of one SPIR-V value. Without `computed` it is only loaded, stored and converted."""
        if computed and dtype.bits < 32 and dtype.kind != "bool":
            self.module.capabilities.add(_COMPUTED[dtype.kind, dtype.bits])
        found = self._ids.get(dtype)
        if found is None:
            found = self._ids[dtype] = self._declare(dtype)
        return found

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
        """Narrow types that no buffer has are declared by the capability to compute with them."""
        capabilities = self.module.capabilities
        for bits, stored in _STORED.items():
            if stored not in capabilities:
                narrow = {(dtype.kind, dtype.bits) for dtype in self._ids if dtype.bits == bits}
                capabilities |= {_COMPUTED[key] for key in narrow}

    def constant(self, dtype: DType, value: int | float) -> int:
        """A constant of one SPIR-V type: a vector has `value` in each lane."""
        key = (dtype, repr(value) if isinstance(value, float) else value)  # 0.0 == -0.0, NaN != NaN
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self._make_constant(dtype, value)
        return found

    def _make_constant(self, dtype: DType, value: int | float) -> int:
        type_id = self.id(dtype)
        if dtype.lanes > 1:
            part = self.constant(dtype.scalar, value)
            return self.module.constant(Op.ConstantComposite, type_id, *[part] * dtype.lanes)
        if dtype.kind == "bool":
            return self.module.constant(Op.ConstantTrue if value else Op.ConstantFalse, type_id)
        return self.module.constant(Op.Constant, type_id, *literal(dtype, value))


def literal(dtype: DType, value: int | float) -> tuple[int, ...]:
    """The words of a number: narrow integers are extended by their sign, narrow floats by zeros (2.2.1)."""
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
    except OverflowError:  # beyond the largest number of the dtype
        raw = struct.pack("<" + codes[bits], float("inf") if value > 0 else float("-inf"))
    raw += b"\0" * (-len(raw) % 4)
    return struct.unpack(f"<{len(raw) // 4}I", raw)
