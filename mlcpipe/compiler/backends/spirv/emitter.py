"""Emits a function's instructions on TensorIR values: vectors in parts, value numbering, blocks and branches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from mlcpipe.compiler.backends.spirv.module import Module, instruction
from mlcpipe.compiler.backends.spirv.opcodes import Decoration, Op
from mlcpipe.compiler.backends.spirv.types import BOOL, DType, Types, chunks

_CONTRACTED = {Op.FAdd, Op.FSub, Op.FMul, Op.FDiv}
# Safe to hoist out of a loop that may not execute it: cheap arithmetic that never fails.
_HOISTED = frozenset({
    Op.IAdd, Op.ISub, Op.IMul, Op.ShiftLeftLogical, Op.ShiftRightLogical, Op.ShiftRightArithmetic, Op.BitwiseAnd,
    Op.BitwiseOr, Op.BitwiseXor, Op.Bitcast, Op.SConvert, Op.UConvert, Op.ConvertSToF, Op.ConvertUToF, Op.FConvert,
    Op.FAdd, Op.FSub, Op.FMul, Op.SLessThan, Op.ULessThan, Op.SGreaterThanEqual, Op.LogicalAnd, Op.Select,
})  # fmt: skip


class Value(NamedTuple):
    """A value of a dtype: one id for each of `chunks(dtype.lanes)`."""

    dtype: DType
    parts: tuple[int, ...]

    @property
    def id(self) -> int:
        """The id of a value with one part."""
        (part,) = self.parts
        return part

    def part_dtypes(self) -> list[DType]:
        return [self.dtype.vector(n) for n in chunks(self.dtype.lanes)]


@dataclass
class _Loop:
    """An open loop: the scope of its blocks, where the code before it ends, and what was hoisted to that point."""

    scope: int
    position: int
    hoisted: list[int]


class Emitter:
    """The body of a function.

    `pure` numbers values: while the block of an instruction without effects dominates, equal instructions reuse its
    result. `exact`: every float operation is rounded (NoContraction).
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.types = Types(module)
        self.code: list[int] = []
        self.first = self.block = module.new_id()  # labels of the first block and of the current one
        self.exact = False
        self._scopes: list[dict[tuple[int | bool, ...], int]] = [{}]
        self._loops: list[_Loop] = []
        self._depth: dict[int, int] = {}  # result -> its scope; constants are not in it, they are known everywhere
        self._built: dict[int, tuple[int, ...]] = {}  # constructed vector -> its lanes

    # Instructions on ids

    def emit(self, op: int, *operands: int) -> None:
        """Append an instruction without a result."""
        instruction(self.code, op, operands)

    def result(self, op: int, type_id: int, *operands: int) -> int:
        """Append an instruction and return the id of its result."""
        return self._result(self.code, len(self._scopes) - 1, op, type_id, operands)

    def _result(self, code: list[int], scope: int, op: int, type_id: int, operands: tuple[int, ...]) -> int:
        result = self.module.new_id()
        self._depth[result] = scope
        instruction(code, op, (type_id, result, *operands))
        if self.exact and op in _CONTRACTED:
            self.module.decorate(result, Decoration.NoContraction)
        return result

    def pure(self, op: int, type_id: int, *operands: int) -> int:
        """The result of an instruction that depends only on its operands; hoisted out of loops if possible."""
        key = (op, type_id, *operands, self.exact)
        for results in self._scopes:
            result = results.get(key)
            if result is not None:
                return result
        code, scope = self.code, len(self._scopes) - 1
        if self._loops and op in _HOISTED:
            needed = max(self._depth.get(operand, 0) for operand in operands)
            outside = next((loop for loop in self._loops if needed < loop.scope), None)
            if outside is not None:
                code, scope = outside.hoisted, outside.scope - 1
        result = self._scopes[scope][key] = self._result(code, scope, op, type_id, operands)
        return result

    def glsl(self, number: int, type_id: int, *operands: int) -> int:
        """The result of a GLSL.std.450 instruction."""
        return self.pure(Op.ExtInst, type_id, self.module.glsl, number, *operands)

    # Values

    def constant(self, dtype: DType, value: int | float) -> Value:
        """A constant with `value` in each lane."""
        return Value(dtype, tuple(self.types.constant(dtype.vector(n), value) for n in chunks(dtype.lanes)))

    def each(self, op: int, dtype: DType, *operands: Value, computed: bool = True) -> Value:
        """Apply an instruction to each part. The operands have as many lanes as `dtype`."""
        parts = tuple(
            self.pure(op, self.types.id(dtype.vector(n), computed), *[operand.parts[i] for operand in operands])
            for i, n in enumerate(chunks(dtype.lanes))
        )
        return Value(dtype, parts)

    def each_glsl(self, number: int, dtype: DType, *operands: Value) -> Value:
        """Like `each`, for a GLSL.std.450 instruction."""
        parts = tuple(
            self.glsl(number, self.types.id(dtype.vector(n)), *[operand.parts[i] for operand in operands])
            for i, n in enumerate(chunks(dtype.lanes))
        )
        return Value(dtype, parts)

    def lanes(self, value: Value) -> list[int]:
        """The id of each lane."""
        if value.dtype.lanes == 1:
            return list(value.parts)
        ids: list[int] = []
        scalar = self.types.id(value.dtype.scalar)
        for part, count in zip(value.parts, chunks(value.dtype.lanes)):
            if count == 1:
                ids.append(part)
            elif part in self._built:
                ids.extend(self._built[part])
            else:
                ids.extend(self.pure(Op.CompositeExtract, scalar, part, i) for i in range(count))
        return ids

    def from_lanes(self, dtype: DType, ids: Sequence[int]) -> Value:
        """A vector made of scalars."""
        parts, at = [], 0
        for count in chunks(dtype.lanes):
            if count == 1:
                parts.append(ids[at])
            else:
                part = self.pure(Op.CompositeConstruct, self.types.id(dtype.vector(count)), *ids[at : at + count])
                self._built[part] = tuple(ids[at : at + count])
                parts.append(part)
            at += count
        return Value(dtype, tuple(parts))

    def splat(self, value: Value, lanes: int) -> Value:
        """A scalar in each lane."""
        return value if lanes == 1 else self.from_lanes(value.dtype.vector(lanes), value.parts * lanes)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """`yes` where the condition holds, else `no`, which has the same dtype."""
        condition = self.splat(condition, yes.dtype.lanes) if condition.dtype.lanes == 1 else condition
        return self.each(Op.Select, yes.dtype, condition, yes, no)

    # Blocks

    def start(self, label: int) -> None:
        """Begin a block."""
        self.emit(Op.Label, label)
        self.block = label

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Values computed inside are not reused outside."""
        self._scopes.append({})
        yield
        self._scopes.pop()

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Enclose a loop's blocks, starting with the branch to its header."""
        self._loops.append(_Loop(len(self._scopes), len(self.code), []))
        with self.scope():
            yield
        closed = self._loops.pop()
        self.code[closed.position : closed.position] = closed.hoisted

    def branch(
        self, condition: Value, then: Callable[[], Value | None], otherwise: Callable[[], Value | None] | None = None
    ) -> Value | None:
        """Emit an if statement. Where both branches return a value, so does it."""
        new = self.module.new_id
        yes, merge = new(), new()
        no = new() if otherwise else merge
        self.emit(Op.SelectionMerge, merge, 0)
        self.emit(Op.BranchConditional, condition.id, yes, no)
        ends: list[tuple[Value | None, int]] = []
        for label, part in ((yes, then), (no, otherwise)):
            if part is None:
                continue
            self.start(label)
            with self.scope():
                ends.append((part(), self.block))
            self.emit(Op.Branch, merge)
        self.start(merge)
        (first, first_block), (second, second_block) = ends[0], ends[-1]
        if first is None or second is None:
            return None
        parts = tuple(
            self.result(Op.Phi, self.types.id(dtype), a, first_block, b, second_block)
            for dtype, a, b in zip(first.part_dtypes(), first.parts, second.parts)
        )
        return Value(first.dtype, parts)

    def boolean(self) -> int:
        """The id of the boolean type."""
        return self.types.id(BOOL)
