"""What TVM can prove about integers: bounds, divisors, and whether an int64 needs more than 32 bits."""

from __future__ import annotations

from typing import Any

from tvm.sym import Analyzer, ConstIntBound

from mlcpipe.compiler.backends.spirv.arithmetic import OPERATORS
from mlcpipe.compiler.backends.spirv.types import DType

_POS_INF, _NEG_INF = ConstIntBound.POS_INF, ConstIntBound.NEG_INF
# The low 32 bits of the result depend only on the low 32 bits of the operands. So do left shifts by less than 32.
_MODULAR = frozenset({"Add", "Sub", "Mul", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})


def is_lossless(source: DType, to: DType) -> bool:
    """Whether a cast between integer dtypes keeps every number."""
    return source.bits < to.bits and (source.kind == "uint" or to.kind == "int") or source.scalar == to.scalar


class Bounds:
    """Bounds of a kernel's integer expressions."""

    def __init__(self) -> None:
        self.analyzer = Analyzer()
        self._from_memory: set[int] = set()  # Vars that depend on values loaded from memory

    def define(self, var: Any, value: Any, changed: bool) -> None:
        """Record the value of an integer Var. `changed`: a cast in it changes numbers, so TVM's bounds do not hold."""
        # Analyzer.bind would apply all simplifications to the value, which takes longer than everything else here.
        # A loop that TVM unrolled defines a Var once per iteration.
        bound = ConstIntBound(_NEG_INF, _POS_INF) if changed else self.analyzer.const_int_bound(value)
        self.analyzer.update(var, bound, True)
        self.analyzer.update(var, self.analyzer.modular_set(value), True)
        (self._from_memory.add if self._reads(value) else self._from_memory.discard)(var.__chandle__())

    def fits(self, expr: Any, dtype: DType) -> bool:
        """Whether an integer provably fits a dtype."""
        bound = self.analyzer.const_int_bound(expr)
        lowest = -(1 << dtype.bits - 1) if dtype.kind == "int" else 0
        return bool(lowest <= bound.min_value and bound.max_value < lowest + (1 << dtype.bits))

    def needs_64_bits(self, name: str, left: Any, right: Any) -> bool:
        """Whether the result of an operator on two int64 may depend on more than their low 32 bits."""
        if name == "LShift":
            return bool(self.analyzer.const_int_bound(right).max_value >= 32)
        return name not in _MODULAR and (self.exceeds_32_bits(left) or self.exceeds_32_bits(right))

    def exceeds_32_bits(self, expr: Any) -> bool:
        """Whether an int64 may exceed 32 bits, as far as TVM knows. Sizes do not: hosts check them."""
        bound = self.analyzer.const_int_bound(expr)
        low, high = bound.min_value, bound.max_value
        if _NEG_INF < low < -(1 << 31) or 1 << 31 <= high < _POS_INF:
            return True
        return (low == _NEG_INF or high == _POS_INF) and self._reads(expr)

    def _reads(self, expr: Any) -> bool:
        """Whether an integer depends on values loaded from memory."""
        name = type(expr).__name__
        if name == "Var":
            return expr.__chandle__() in self._from_memory
        if name in OPERATORS:
            return self._reads(expr.a) or self._reads(expr.b)
        if name == "Cast":
            return self._reads(expr.value)
        if name == "Call":
            return any(self._reads(arg) for arg in expr.args)
        return name not in ("IntImm", "FloatImm", "StringImm")
