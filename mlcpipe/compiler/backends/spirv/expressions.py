"""Expressions of TensorIR.

An int64 whose value fits 32 bits has 32 bits here: TVM computes shapes and indices in int64, but GPUs have no 64-bit
registers. Sizes and loop variables start with 32 bits, loads of int64 have 64, and an operation has the width of its
wider operand. A value that is stored as int64 or converted to float is computed in 64 bits. So is one that may exceed
32 bits if the result depends on more than the low 32: quotients, comparisons, right shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mlcpipe.compiler.backends.spirv.arithmetic import OPERATORS, binary, divided, joined
from mlcpipe.compiler.backends.spirv.bounds import Bounds, is_lossless
from mlcpipe.compiler.backends.spirv.casts import cast, reinterpret
from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.intrinsics import CALLED_OPERATORS, PREFIX, Intrinsics
from mlcpipe.compiler.backends.spirv.matrices import MATRIX, Matrices
from mlcpipe.compiler.backends.spirv.memory import Array, Index, Memory, Run
from mlcpipe.compiler.backends.spirv.opcodes import Op, Storage
from mlcpipe.compiler.backends.spirv.types import (
    INT32,
    INT64,
    UINT32,
    UINT64,
    DType,
    Unsupported,
    dtype_of,
    integer,
    void,
)

_CHEAP_NODES = 8  # an if_then_else with at most so many becomes a select
_IDENTITIES = ("likely", "tvm_thread_invariant")


class Widen(Exception):
    """Generate the kernel again: the Var `key`, int64, got 32 bits but is used where it needs 64."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.key = key


class Expressions:
    """Generates expressions. `env`: handle of a Var -> its value. `widened`: Vars with 64 bits (see Widen)."""

    def __init__(self, emitter: Emitter, memory: Memory, widened: Collection[int] = ()) -> None:
        self.emitter = emitter
        self.memory = memory
        self.intrinsics = Intrinsics(emitter)
        self.matrices = Matrices(emitter, memory)
        self.bounds = Bounds()
        self.env: dict[int, Value] = {}
        self._wide = False  # int64 has 64 bits
        self._widened = widened
        self._changed = False  # a cast in the current expression changes numbers
        self._cut: set[int] = set()  # Vars that were computed in 32 bits but may exceed them
        self._visitors: dict[str, Callable[[Any], Value | None]] = {
            "Var": self._var,
            "IntImm": self._int,
            "FloatImm": lambda e: self.emitter.constant(dtype_of(e), float(e.value)),
            "TensorLoad": lambda e: self.memory.load(e.source.__chandle__(), self.index(e.indices)),
            "Cast": self._cast,
            "Not": lambda e: self._unary(Op.LogicalNot, e.a),
            "BitwiseNot": lambda e: self._unary(Op.Not, e.a),
            "Select": self._select,
            "Let": self._let,
            "Broadcast": lambda e: self.emitter.splat(self(e.value), dtype_of(e).lanes),
            "Ramp": self._ramp,
            "Shuffle": self._shuffle,
            "Call": self._call,
        }

    def __call__(self, expr: Any) -> Value:
        """The value of an expression. Raises Unsupported if it has none."""
        value = self.maybe(expr)
        if value is None:
            raise Unsupported(f"the value of {expr}")
        return value

    def maybe(self, expr: Any) -> Value | None:
        """The value of an expression, if it has one."""
        name = type(expr).__name__
        if name in OPERATORS:
            return self._binary(name, expr.a, expr.b)
        visit = self._visitors.get(name)
        if visit is None:
            raise Unsupported(f"expression {name}")
        return visit(expr)

    @contextmanager
    def wide(self, dtype: DType) -> Iterator[None]:
        """Compute int64 in 64 bits inside, if `dtype` has 64: the result is not just an index."""
        before, self._wide = self._wide, self._wide or dtype.bits == 64
        yield
        self._wide = before

    def index(self, indices: Any) -> Index:
        """The index of a load or store."""
        if len(indices) != 1:
            raise Unsupported(f"memory of {len(indices)} dimensions")
        (index,) = indices
        before, self._wide = self._wide, False
        position: Index
        if type(index).__name__ == "Ramp" and integer(index.stride) == 1:
            position = Run(self(index.base), dtype_of(index).lanes, self._alignment(index.base))
        else:
            position = self(index)
        self._wide = before
        return position

    def _alignment(self, base: Any) -> int:
        multiple = self.bounds.analyzer.modular_set(base)
        return next(n for n in (4, 2, 1) if multiple.coeff % n == 0 and multiple.base % n == 0)

    # Leaves

    def _var(self, expr: Any) -> Value:
        key = expr.__chandle__()
        value = self.env.get(key)
        if value is None:
            raise Unsupported(f"undefined variable {expr}")
        if self._wide and key in self._cut:
            raise Widen(key)
        return value

    def _int(self, expr: Any) -> Value:
        dtype, number = dtype_of(expr), int(expr.value)
        if dtype.scalar == INT64 and not self._wide and -(1 << 31) <= number < 1 << 31:
            dtype = INT32.vector(dtype.lanes)
        return self.emitter.constant(dtype, number)

    # Operators

    def _unary(self, op: int, operand: Any) -> Value:
        value = self(operand)
        return self.emitter.each(op, value.dtype, value)

    def _binary(self, name: str, left: Any, right: Any) -> Value:
        is_int64 = dtype_of(left).scalar == INT64
        if is_int64 and not self._wide and self.bounds.needs_64_bits(name, left, right):
            with self.wide(INT64):
                return self._binary(name, left, right)
        a, cut = self._and_whether_cut(left)
        divisor = integer(right) if name in ("Div", "Mod") and a.dtype.kind == "int" and not cut else None
        if divisor is not None and divisor > 0 and self.bounds.analyzer.const_int_bound(left).min_value >= 0:
            return divided(self.emitter, name, a, divisor)
        b = self(right)
        if is_int64 and a.dtype.bits != b.dtype.bits:
            a, b = self._in_64_bits(a, left), self._in_64_bits(b, right)
        elif is_int64 and self._wide and a.dtype.bits == 32:
            a, b = (cast(self.emitter, value, INT64.vector(value.dtype.lanes)) for value in (a, b))
        return binary(self.emitter, name, a, b)

    def _and_whether_cut(self, expr: Any) -> tuple[Value, bool]:
        """A value, and whether a cast in it changes numbers: TVM's bounds assume that none does."""
        before, self._changed = self._changed, False
        value, changed = self(expr), self._changed
        self._changed = before or changed
        return value, changed

    def _in_64_bits(self, value: Value, expr: Any) -> Value:
        """The value of an int64 in 64 bits, computed again if it has fewer."""
        if value.dtype.bits == 64:
            return value
        with self.wide(INT64):
            return cast(self.emitter, self(expr), INT64.vector(value.dtype.lanes))

    def _cast(self, expr: Any) -> Value:
        to, source = dtype_of(expr), dtype_of(expr.value)
        # A number that only contributes to an index may have 32 bits; one that becomes a float may not.
        with self.wide(INT32 if to.is_integer and to.scalar != UINT64 else source):
            value = self(expr.value)
        if to.is_integer and value.dtype.is_integer and not is_lossless(value.dtype, to):
            self._changed |= not self.bounds.fits(expr.value, to)
        if to.scalar == INT64 and not self._wide and value.dtype.is_integer and value.dtype.bits <= 32:
            if value.dtype.scalar == UINT32 and not self.bounds.fits(expr.value, INT32):
                return cast(self.emitter, value, to)
            return cast(self.emitter, value, INT32.vector(to.lanes))
        return cast(self.emitter, value, to)

    def _select(self, expr: Any) -> Value:
        return self.emitter.select(self(expr.condition), *self._both(expr.true_value, expr.false_value))

    def _both(self, yes: Any, no: Any) -> tuple[Value, Value]:
        """The two values of a choice, in one dtype."""
        a, b = self(yes), self(no)
        if a.dtype.bits != b.dtype.bits:
            a, b = self._in_64_bits(a, yes), self._in_64_bits(b, no)
        return joined(self.emitter, a, b)

    def _let(self, expr: Any) -> Value:
        self.define(expr.var, expr.value)
        return self(expr.body)

    def define(self, var: Any, value: Any) -> None:
        """Bind a Var to a value."""
        key = var.__chandle__()
        cut = dtype_of(value) == INT64 and not self._wide and self.bounds.exceeds_32_bits(value)
        with self.wide(INT64 if cut and key in self._widened else INT32):
            computed, changed = self._and_whether_cut(value)
        self.env[key] = computed
        (self._cut.add if computed.dtype.bits < 64 and cut else self._cut.discard)(key)
        if computed.dtype.is_integer and computed.dtype.lanes == 1:
            self.bounds.define(var, value, changed)

    # Vectors

    def _ramp(self, expr: Any) -> Value:
        base, stride = joined(self.emitter, self(expr.base), self(expr.stride))
        lanes = [base]
        for i in range(1, dtype_of(expr).lanes):
            step = binary(self.emitter, "Mul", stride, self.emitter.constant(stride.dtype, i))
            lanes.append(binary(self.emitter, "Add", base, step))
        return self.emitter.from_lanes(base.dtype.vector(len(lanes)), [lane.id for lane in lanes])

    def _shuffle(self, expr: Any) -> Value:
        vectors = [self(vector) for vector in expr.vectors]
        lanes = [lane for vector in vectors for lane in self.emitter.lanes(vector)]
        chosen = [lanes[int(i)] for i in expr.indices]
        return self.emitter.from_lanes(vectors[0].dtype.vector(len(chosen)), chosen)

    # Calls

    def _call(self, expr: Any) -> Value | None:
        name, args = expr.op.name.split(".", 1)[1], list(expr.args)  # after `tirx.` or `prim.`
        if name in ("call_extern", "call_pure_extern"):
            name, args = str(args[0].value), args[1:]
        if name in _IDENTITIES:
            return self(args[0])
        if name == "if_then_else":
            return self._if_then_else(*args)
        if name == "reinterpret":
            with self.wide(dtype_of(args[0])):
                return reinterpret(self.emitter, self(args[0]), dtype_of(expr))
        if name == "tvm_storage_sync":
            self.intrinsics.barrier(str(args[0].value))
            return None
        if name == "large_uint_imm":
            return self.emitter.constant(dtype_of(expr), int(args[1].value) << 32 | int(args[0].value))
        if name == PREFIX + "exact":
            return self._exact(args[0])
        if name == PREFIX + "require_subgroup_size":
            self.intrinsics.subgroup_size = int(args[0].value)
            return None
        if name.startswith(MATRIX):
            self._matrix(name[len(MATRIX) :], args)
            return None
        if name.startswith(PREFIX + "subgroup_cluster_"):
            lanes = integer(args[1])
            return self.intrinsics.cluster(name[len(PREFIX + "subgroup_cluster_") :], self(args[0]), lanes or 0)
        if name in CALLED_OPERATORS:
            return self._binary(CALLED_OPERATORS[name], *args)
        if not self.intrinsics.knows(name):
            raise Unsupported(f"call of {name}")
        return self.intrinsics.call(name, None if void(expr) else dtype_of(expr), [self._whole(arg) for arg in args])

    def _matrix(self, name: str, args: list[Any]) -> None:
        """A call that `Matrices` handles: integer literals, and the address of an element for a load or store."""
        numbers: list[int] = []
        address: tuple[int, tuple[int, ...]] | None = None
        for arg in args:
            number = integer(arg)
            if number is not None:
                numbers.append(number)
                continue
            load = arg.args[0]  # of tirx.address_of
            index = self.index(load.indices)
            if not isinstance(index, Value):
                raise Unsupported(f"matrix_{name} at a vector of indices")
            address = self.memory.pointer(load.source.__chandle__(), index)
        self.matrices.call(name, numbers, address)

    def _whole(self, expr: Any) -> Value:
        """The value with TVM's number of bits."""
        with self.wide(dtype_of(expr)):
            return self(expr)

    def _exact(self, expr: Any) -> Value:
        """The value with every operation rounded: products and sums are not fused."""
        before, self.emitter.exact = self.emitter.exact, True
        value = self(expr)
        self.emitter.exact = before
        return value

    def _if_then_else(self, condition: Any, yes: Any, no: Any) -> Value:
        test = self(condition)
        if self._nodes(yes) + self._nodes(no) <= _CHEAP_NODES:
            return self.emitter.select(test, *self._both(yes, no))
        value = self.emitter.branch(test, lambda: self._settled(yes), lambda: self._settled(no))
        if value is None:
            raise Unsupported("if_then_else without a value")
        return value

    def _settled(self, expr: Any) -> Value:
        """A value whose width does not depend on the branch: int64 has 64 bits if any buffer has 64-bit elements."""
        dtype = dtype_of(expr)
        if dtype.scalar != INT64:
            return self(expr)
        wide = self._wide or any(binding.element.bits == 64 for binding in self.memory.bindings)
        with self.wide(INT64 if wide else INT32):
            return cast(self.emitter, self(expr), dtype if wide else INT32.vector(dtype.lanes))

    def _nodes(self, expr: Any) -> int:
        """The cost of an expression in nodes; more than _CHEAP_NODES if it may read memory or trap."""
        name = type(expr).__name__
        if name in ("Var", "IntImm", "FloatImm"):
            return 1
        if name in OPERATORS and name not in ("Div", "Mod"):
            return 1 + self._nodes(expr.a) + self._nodes(expr.b)
        if name in ("Cast", "Broadcast"):
            return 1 + self._nodes(expr.value)
        if name == "TensorLoad" and len(expr.indices) == 1 and integer(expr.indices[0]) is not None:
            view = self.memory.views.get(expr.source.__chandle__())
            if view and isinstance(view.memory, Array) and view.memory.storage == Storage.Function:
                return 1
        return _CHEAP_NODES + 1
