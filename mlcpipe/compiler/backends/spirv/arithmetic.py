"""TensorIR's operators on values."""

from __future__ import annotations

from mlcpipe.compiler.backends.spirv.casts import cast
from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.opcodes import Glsl, Op
from mlcpipe.compiler.backends.spirv.types import BOOL, DType, Unsupported

# Name -> instructions for floats, signed integers, unsigned integers.
_NUMBERS: dict[str, tuple[int | None, int | None, int | None]] = {
    "Add": (Op.FAdd, Op.IAdd, Op.IAdd),
    "Sub": (Op.FSub, Op.ISub, Op.ISub),
    "Mul": (Op.FMul, Op.IMul, Op.IMul),
    "Div": (Op.FDiv, Op.SDiv, Op.UDiv),
    "Mod": (Op.FRem, None, Op.UMod),
    "LShift": (None, Op.ShiftLeftLogical, Op.ShiftLeftLogical),
    "RShift": (None, Op.ShiftRightArithmetic, Op.ShiftRightLogical),
    "BitwiseAnd": (None, Op.BitwiseAnd, Op.BitwiseAnd),
    "BitwiseOr": (None, Op.BitwiseOr, Op.BitwiseOr),
    "BitwiseXor": (None, Op.BitwiseXor, Op.BitwiseXor),
}
_COMPARISONS: dict[str, tuple[int, int, int]] = {
    "EQ": (Op.FOrdEqual, Op.IEqual, Op.IEqual),
    "NE": (Op.FUnordNotEqual, Op.INotEqual, Op.INotEqual),
    "LT": (Op.FOrdLessThan, Op.SLessThan, Op.ULessThan),
    "LE": (Op.FOrdLessThanEqual, Op.SLessThanEqual, Op.ULessThanEqual),
    "GT": (Op.FOrdGreaterThan, Op.SGreaterThan, Op.UGreaterThan),
    "GE": (Op.FOrdGreaterThanEqual, Op.SGreaterThanEqual, Op.UGreaterThanEqual),
}
# If one operand is NaN, NMin and NMax return the other on every device; FMin and FMax may return either.
_EXTREMES = {"Min": (Glsl.NMin, Glsl.SMin, Glsl.UMin), "Max": (Glsl.NMax, Glsl.SMax, Glsl.UMax)}
_LOGIC = {
    "And": Op.LogicalAnd,
    "Or": Op.LogicalOr,
    "EQ": Op.LogicalEqual,
    "NE": Op.LogicalNotEqual,
    "BitwiseAnd": Op.LogicalAnd,
    "BitwiseOr": Op.LogicalOr,
    "BitwiseXor": Op.LogicalNotEqual,
}
OPERATORS = frozenset({*_NUMBERS, *_COMPARISONS, *_EXTREMES, *_LOGIC})
_KINDS = {"float": 0, "int": 1, "uint": 2}


def joined(emitter: Emitter, a: Value, b: Value) -> tuple[Value, Value]:
    """Both values in one dtype: of two int64, one may have 32 bits here. Raises Unsupported."""
    if a.dtype.bits < b.dtype.bits:
        a = cast(emitter, a, b.dtype)
    elif b.dtype.bits < a.dtype.bits:
        b = cast(emitter, b, a.dtype)
    if a.dtype != b.dtype:
        raise Unsupported(f"operands of {a.dtype} and {b.dtype}")
    return a, b


def binary(emitter: Emitter, name: str, a: Value, b: Value) -> Value:
    """Apply an operator of OPERATORS. Raises Unsupported for dtypes that it does not have."""
    a, b = joined(emitter, a, b)
    dtype = a.dtype
    if dtype.kind == "bool":
        return emitter.each(_operation(_LOGIC.get(name), name, dtype), dtype, a, b)
    emitter.types.id(dtype.scalar)  # adds the capability to compute with it
    kind = _KINDS[dtype.kind]
    if name in _EXTREMES:
        return emitter.each_glsl(_EXTREMES[name][kind], dtype, a, b)
    if name in _COMPARISONS:
        return emitter.each(_COMPARISONS[name][kind], BOOL.vector(dtype.lanes), a, b)
    if name == "Mod" and dtype.kind == "int":
        # OpSRem of negative numbers is undefined (Vulkan 1.2, appendix A, precision of integers).
        quotient = emitter.each(Op.SDiv, dtype, a, b)
        return emitter.each(Op.ISub, dtype, a, emitter.each(Op.IMul, dtype, quotient, b))
    return emitter.each(_operation(_NUMBERS.get(name, (None,) * 3)[kind], name, dtype), dtype, a, b)


def _operation(op: int | None, name: str, dtype: DType) -> int:
    if op is None:
        raise Unsupported(f"{name} of {dtype}")
    return op


def divided(emitter: Emitter, name: str, a: Value, divisor: int) -> Value:
    """Div or Mod of a provably non-negative `a` by a positive number: a shift, a mask, or unsigned division."""
    dtype = a.dtype
    if divisor & (divisor - 1) == 0:
        if name == "Mod":
            return emitter.each(Op.BitwiseAnd, dtype, a, emitter.constant(dtype, divisor - 1))
        shift = emitter.constant(dtype, divisor.bit_length() - 1)
        return emitter.each(Op.ShiftRightLogical, dtype, a, shift)
    unsigned = DType("uint", dtype.bits, dtype.lanes)
    op = Op.UDiv if name == "Div" else Op.UMod
    result = emitter.each(op, unsigned, cast(emitter, a, unsigned), emitter.constant(unsigned, divisor))
    return cast(emitter, result, dtype)
