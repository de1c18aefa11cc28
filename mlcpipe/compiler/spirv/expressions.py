"""Expressions of TensorIR.

An int64 whose value fits 32 bits has 32 here: TVM computes shapes and indices in int64, GPUs have no such registers.
Sizes and loop variables begin with 32 bits, loads of int64 have 64, and an operation has the more of its operands'.
What is stored as int64, or becomes a float, is computed in 64; so is what TVM knows to pass 32 bits, where a result
depends on more than the low 32: quotients, comparisons, shifts to the right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mlcpipe.compiler.spirv.arithmetic import OPERATORS, binary, divided, joined
from mlcpipe.compiler.spirv.bounds import Bounds, keeps
from mlcpipe.compiler.spirv.casts import cast, reinterpret
from mlcpipe.compiler.spirv.emitter import Emitter, Value
from mlcpipe.compiler.spirv.intrinsics import CALLED_OPERATORS, PREFIX, Intrinsics
from mlcpipe.compiler.spirv.matrices import MATRIX, Matrices
from mlcpipe.compiler.spirv.memory import Array, Index, Memory, Run
from mlcpipe.compiler.spirv.opcodes import Op, Storage
from mlcpipe.compiler.spirv.types import INT32, INT64, UINT32, UINT64, DType, Unsupported, dtype_of, integer, void

_CHEAP_NODES = 8  # of an expression that is computed rather than branched around
_SAME = ("likely", "tvm_thread_invariant")


class Widen(Exception):
    """The kernel is to be written anew: an int64 that was for indices, as it seemed, is needed in 64 bits."""

    def __init__(self, key: int) -> None:
        super().__init__(key)
        self.key = key


class Expressions:
    """Values of expressions. `env`: handle of a Var -> its value. `widened`: Vars that have 64 bits (see Widen)."""

    def __init__(self, emitter: Emitter, memory: Memory, widened: Collection[int] = ()) -> None:
        self.emitter = emitter
        self.memory = memory
        self.intrinsics = Intrinsics(emitter)
        self.matrices = Matrices(emitter, memory)
        self.bounds = Bounds()
        self.env: dict[int, Value] = {}
        self._wide = False  # int64 has 64 bits
        self._widened = widened
        self._changed = False  # a cast of what is being written gives other numbers
        self._cut: set[int] = set()  # Vars of which the low 32 bits are known
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
        """The value of an expression that has one."""
        found = self.maybe(expr)
        if found is None:
            raise Unsupported(f"the value of {expr}")
        return found

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
        """Compute int64 in 64 bits, where the result is of this dtype and is no index."""
        before, self._wide = self._wide, self._wide or dtype.bits == 64
        yield
        self._wide = before

    def index(self, indices: Any) -> Index:
        """Where a load or a store goes."""
        if len(indices) != 1:
            raise Unsupported(f"memory of {len(indices)} dimensions")
        (index,) = indices
        before, self._wide = self._wide, False
        found: Index
        if type(index).__name__ == "Ramp" and integer(index.stride) == 1:
            found = Run(self(index.base), dtype_of(index).lanes, self._alignment(index.base))
        else:
            found = self(index)
        self._wide = before
        return found

    def _alignment(self, base: Any) -> int:
        known = self.bounds.analyzer.modular_set(base)
        return next(n for n in (4, 2, 1) if known.coeff % n == 0 and known.base % n == 0)

    # Leaves

    def _var(self, expr: Any) -> Value:
        key = expr.__chandle__()
        found = self.env.get(key)
        if found is None:
            raise Unsupported(f"variable {expr} that nothing defines")
        if self._wide and key in self._cut:
            raise Widen(key)
        return found

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
        if is_int64 and not self._wide and self.bounds.pass_32_bits(name, left, right):
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
        """A value, and whether a cast in it changes numbers: TVM's bounds take for granted that none does."""
        before, self._changed = self._changed, False
        value, changed = self(expr), self._changed
        self._changed = before or changed
        return value, changed

    def _in_64_bits(self, value: Value, expr: Any) -> Value:
        """The value of an int64 in 64 bits, where it was computed in fewer."""
        if value.dtype.bits == 64:
            return value
        with self.wide(INT64):
            return cast(self.emitter, self(expr), INT64.vector(value.dtype.lanes))

    def _cast(self, expr: Any) -> Value:
        to, come = dtype_of(expr), dtype_of(expr.value)
        # A number that only an index is made of may have 32 bits; one that becomes a float, say, may not.
        with self.wide(INT32 if to.is_integer and to.scalar != UINT64 else come):
            value = self(expr.value)
        if to.is_integer and value.dtype.is_integer and not keeps(value.dtype, to):
            self._changed |= not self.bounds.fit(expr.value, to)
        if to.scalar == INT64 and not self._wide and value.dtype.is_integer and value.dtype.bits <= 32:
            if value.dtype.scalar == UINT32 and not self.bounds.fit(expr.value, INT32):
                return cast(self.emitter, value, to)
            return cast(self.emitter, value, INT32.vector(to.lanes))
        return cast(self.emitter, value, to)

    def _select(self, expr: Any) -> Value:
        return self.emitter.select(self(expr.condition), *self._both(expr.true_value, expr.false_value))

    def _both(self, yes: Any, no: Any) -> tuple[Value, Value]:
        """Two values of which one is taken, in one dtype."""
        a, b = self(yes), self(no)
        if a.dtype.bits != b.dtype.bits:
            a, b = self._in_64_bits(a, yes), self._in_64_bits(b, no)
        return joined(self.emitter, a, b)

    def _let(self, expr: Any) -> Value:
        self.define(expr.var, expr.value)
        return self(expr.body)

    def define(self, var: Any, value: Any) -> None:
        """A name for a value, from here on."""
        key = var.__chandle__()
        cut = dtype_of(value) == INT64 and not self._wide and self.bounds.beyond(value)
        with self.wide(INT64 if cut and key in self._widened else INT32):
            found, changed = self._and_whether_cut(value)
        self.env[key] = found
        (self._cut.add if found.dtype.bits < 64 and cut else self._cut.discard)(key)
        if found.dtype.is_integer and found.dtype.lanes == 1:
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
        if name in _SAME:
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
        """A call of `matrices`: numbers, and perhaps the address of an element."""
        numbers: list[int] = []
        place: tuple[int, tuple[int, ...]] | None = None
        for arg in args:
            known = integer(arg)
            if known is not None:
                numbers.append(known)
                continue
            load = arg.args[0]  # of tirx.address_of
            index = self.index(load.indices)
            if not isinstance(index, Value):
                raise Unsupported(f"matrix_{name} at a vector of indices")
            place = self.memory.pointer(load.source.__chandle__(), index)
        self.matrices.call(name, numbers, place)

    def _whole(self, expr: Any) -> Value:
        """A value with all the bits that TVM gave it."""
        with self.wide(dtype_of(expr)):
            return self(expr)

    def _exact(self, expr: Any) -> Value:
        """The value with every operation rounded: no product goes unrounded into a sum."""
        before, self.emitter.exact = self.emitter.exact, True
        found = self(expr)
        self.emitter.exact = before
        return found

    def _if_then_else(self, condition: Any, yes: Any, no: Any) -> Value:
        test = self(condition)
        if self._nodes(yes) + self._nodes(no) <= _CHEAP_NODES:
            return self.emitter.select(test, *self._both(yes, no))
        found = self.emitter.branch(test, lambda: self._settled(yes), lambda: self._settled(no))
        if found is None:
            raise Unsupported("if_then_else without a value")
        return found

    def _settled(self, expr: Any) -> Value:
        """A value of a dtype that does not depend on the branch: int64 has 64 bits where a buffer has."""
        dtype = dtype_of(expr)
        if dtype.scalar != INT64:
            return self(expr)
        wide = self._wide or any(binding.element.bits == 64 for binding in self.memory.bindings)
        with self.wide(INT64 if wide else INT32):
            return cast(self.emitter, self(expr), dtype if wide else INT32.vector(dtype.lanes))

    def _nodes(self, expr: Any) -> int:
        """How much it is to compute an expression; more than _CHEAP_NODES where it may touch memory or trap."""
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
