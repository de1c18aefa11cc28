"""What TVM knows of integers: bounds and divisors, and when an int64 needs more than 32 bits."""

from __future__ import annotations

from typing import Any

from tvm.sym import Analyzer, ConstIntBound

from mlcpipe.compiler.spirv.arithmetic import OPERATORS
from mlcpipe.compiler.spirv.types import DType

_POS_INF, _NEG_INF = ConstIntBound.POS_INF, ConstIntBound.NEG_INF
# Operators whose low 32 bits come from the low 32 of their operands; shifts to the left by less than 32 are as they.
_MODULAR = frozenset({"Add", "Sub", "Mul", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})


def keeps(come: DType, to: DType) -> bool:
    """Whether an integer dtype has all numbers of another."""
    return come.bits < to.bits and (come.kind == "uint" or to.kind == "int") or come.scalar == to.scalar


class Bounds:
    """Of the expressions of a kernel."""

    def __init__(self) -> None:
        self.analyzer = Analyzer()
        self._read: set[int] = set()  # Vars on which memory decides

    def define(self, var: Any, value: Any, changed: bool) -> None:
        """A name for an integer. `changed`: a cast in it changes numbers, of which TVM's bounds do not know."""
        # Analyzer.bind would simplify the value by all its rules, which takes longer than all else here.
        # A loop that TVM unrolled defines a name once a round.
        known = ConstIntBound(_NEG_INF, _POS_INF) if changed else self.analyzer.const_int_bound(value)
        self.analyzer.update(var, known, True)
        self.analyzer.update(var, self.analyzer.modular_set(value), True)
        (self._read.add if self._reads(value) else self._read.discard)(var.__chandle__())

    def fit(self, expr: Any, dtype: DType) -> bool:
        """Whether a dtype is known to have all numbers of an integer."""
        known = self.analyzer.const_int_bound(expr)
        lowest = -(1 << dtype.bits - 1) if dtype.kind == "int" else 0
        return bool(lowest <= known.min_value and known.max_value < lowest + (1 << dtype.bits))

    def pass_32_bits(self, name: str, left: Any, right: Any) -> bool:
        """Whether the low 32 bits of two int64 may not tell the result of an operator."""
        if name == "LShift":
            return bool(self.analyzer.const_int_bound(right).max_value >= 32)
        return name not in _MODULAR and (self.beyond(left) or self.beyond(right))

    def beyond(self, expr: Any) -> bool:
        """Whether an int64 may pass 32 bits, as far as TVM knows: not of sizes, which hosts check."""
        known = self.analyzer.const_int_bound(expr)
        low, high = known.min_value, known.max_value
        if _NEG_INF < low < -(1 << 31) or 1 << 31 <= high < _POS_INF:
            return True
        return (low == _NEG_INF or high == _POS_INF) and self._reads(expr)

    def _reads(self, expr: Any) -> bool:
        """Whether memory decides on an integer."""
        name = type(expr).__name__
        if name == "Var":
            return expr.__chandle__() in self._read
        if name in OPERATORS:
            return self._reads(expr.a) or self._reads(expr.b)
        if name == "Cast":
            return self._reads(expr.value)
        if name == "Call":
            return any(self._reads(arg) for arg in expr.args)
        return name not in ("IntImm", "FloatImm", "StringImm")
