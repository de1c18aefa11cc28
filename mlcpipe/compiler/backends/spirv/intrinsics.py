"""Calls: elementary functions, subgroup operations, barriers.

Where TensorIR has no operator, schedules call external functions (`tir_schedules.gpu.device_calls`). The names of
elementary functions come from `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcpipe.compiler.backends.spirv.arithmetic import binary
from mlcpipe.compiler.backends.spirv.casts import cast, reinterpret, resized
from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.opcodes import BuiltIn, Capability, Glsl, Group, Op, Scope, Semantics
from mlcpipe.compiler.backends.spirv.types import BOOL, INT32, UINT32, DType, Unsupported, chunks

PREFIX = "mlcpipe."

# Functions of floats. Only those of _ANY_FLOAT are defined for 64 bits.
_FLOATS = {
    "exp": Glsl.Exp, "exp2": Glsl.Exp2, "log": Glsl.Log, "log2": Glsl.Log2, "pow": Glsl.Pow,
    "sin": Glsl.Sin, "cos": Glsl.Cos, "tan": Glsl.Tan, "sinh": Glsl.Sinh, "cosh": Glsl.Cosh, "tanh": Glsl.Tanh,
    "asin": Glsl.Asin, "acos": Glsl.Acos, "atan": Glsl.Atan, "atan2": Glsl.Atan2,
    "asinh": Glsl.Asinh, "acosh": Glsl.Acosh, "atanh": Glsl.Atanh,
}  # fmt: skip
_ANY_FLOAT = {
    "sqrt": Glsl.Sqrt, "rsqrt": Glsl.InverseSqrt, "fma": Glsl.Fma, "fabs": Glsl.FAbs, "floor": Glsl.Floor,
    "ceil": Glsl.Ceil, "trunc": Glsl.Trunc, "round": Glsl.RoundEven, "nearbyint": Glsl.RoundEven,
}  # fmt: skip
# TensorIR operators that arrive as calls.
CALLED_OPERATORS = {
    "bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor", "shift_left": "LShift",
    "shift_right": "RShift", "fmod": "Mod", "min": "Min", "max": "Max",
}  # fmt: skip
_OTHERS = ("bitwise_not", "isnan", "isinf", "abs", "popcount", "clz")
# Name -> instructions on floats, signed integers, unsigned integers.
_REDUCTIONS = {
    "add": (Op.GroupNonUniformFAdd, Op.GroupNonUniformIAdd, Op.GroupNonUniformIAdd),
    "max": (Op.GroupNonUniformFMax, Op.GroupNonUniformSMax, Op.GroupNonUniformUMax),
}
_SHUFFLES = {
    "shuffle": Op.GroupNonUniformShuffle,
    "shuffle_xor": Op.GroupNonUniformShuffleXor,
    "broadcast": Op.GroupNonUniformShuffle,  # before 1.5, OpGroupNonUniformBroadcast takes only constants
}
_BUILTINS = {"lane": BuiltIn.SubgroupLocalInvocationId, "id": BuiltIn.SubgroupId}


class Intrinsics:
    """Calls whose arguments are computed values."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.subgroup_size = 0  # the size that the kernel requires; 0: any
        self.extended_types = False  # subgroup operations on types other than 32 bits and float64
        self._semantics = 0  # id of the barriers' constant, whose value `finish` computes once all loads are known

    def knows(self, name: str) -> bool:
        """Whether `call` accepts a function's name; subgroup functions are checked only there."""
        own = name[len(PREFIX) :] if name.startswith(PREFIX) else ""
        return (
            name in _FLOATS or name in _ANY_FLOAT or name in _OTHERS
            or own.startswith("subgroup_") or own == "half_pair"
        )  # fmt: skip

    def call(self, name: str, dtype: DType | None, args: Sequence[Value]) -> Value:
        """The result of a call. `dtype` is what the call states. Raises Unsupported."""
        emitter = self._emitter
        if name in _FLOATS or name in _ANY_FLOAT:
            return self._float(name, args)
        if name == "bitwise_not":
            return emitter.each(Op.LogicalNot if args[0].dtype.kind == "bool" else Op.Not, args[0].dtype, args[0])
        if name in ("isnan", "isinf"):
            wide = cast(emitter, args[0], DType("float", max(32, args[0].dtype.bits), args[0].dtype.lanes))
            return emitter.each(Op.IsNan if name == "isnan" else Op.IsInf, BOOL.vector(wide.dtype.lanes), wide)
        if name == "abs":
            emitter.types.id(args[0].dtype.scalar)
            return emitter.each_glsl(Glsl.FAbs if args[0].dtype.kind == "float" else Glsl.SAbs, args[0].dtype, args[0])
        if name in ("popcount", "clz"):
            return self._bits(name, args[0], dtype)
        if name.startswith(PREFIX + "subgroup_"):
            return self._subgroup(name[len(PREFIX + "subgroup_") :], dtype, args)
        if name == PREFIX + "half_pair":
            pair = emitter.from_lanes(DType("float", 32, 2), [arg.id for arg in args])
            return reinterpret(emitter, cast(emitter, pair, DType("float", 16, 2)), UINT32)
        raise Unsupported(f"call of {name}")

    def barrier(self, scope: str) -> None:
        """Wait for the workgroup (`shared`) or the subgroup (`warp`), and make their stores visible."""
        if scope not in ("shared", "shared.dyn", "warp"):
            raise Unsupported(f"barrier of scope {scope}")
        scope_id = self._emitter.types.constant(UINT32, Scope.Subgroup if scope == "warp" else Scope.Workgroup)
        self._semantics = self._semantics or self._emitter.module.new_id()
        self._emitter.emit(Op.ControlBarrier, scope_id, scope_id, self._semantics)

    def finish(self, device_memory: bool) -> None:
        """Declare what barriers order: shared memory, and buffers too if the kernel reads one that it writes."""
        if self._semantics:
            order = Semantics.AcquireRelease | Semantics.WorkgroupMemory
            order |= Semantics.UniformMemory if device_memory else 0
            if self._emitter.module.vulkan_memory:
                order |= Semantics.MakeAvailable | Semantics.MakeVisible
            self._emitter.module.constant_as(self._semantics, self._emitter.types.id(UINT32), order)

    def _float(self, name: str, args: Sequence[Value]) -> Value:
        dtype = args[0].dtype
        if dtype.kind != "float" or (dtype.bits == 64 and name in _FLOATS):
            raise Unsupported(f"{name} of {dtype}")
        return self._emitter.each_glsl(_FLOATS[name] if name in _FLOATS else _ANY_FLOAT[name], dtype, *args)

    def _bits(self, name: str, value: Value, dtype: DType | None) -> Value:
        """`popcount` and `clz`, in 32 bits: Vulkan counts bits of no other integers."""
        emitter, have = self._emitter, value.dtype
        if not have.is_integer or have.bits > 32 or have.lanes > 1:
            raise Unsupported(f"{name} of {have}")
        wide = resized(emitter, cast(emitter, value, DType("uint", have.bits)), 32)
        if name == "popcount":
            count = emitter.each(Op.BitCount, UINT32, wide)
        else:
            highest = cast(emitter, emitter.each_glsl(Glsl.FindUMsb, UINT32, wide), INT32)
            count = binary(emitter, "Sub", emitter.constant(INT32, have.bits - 1), highest)
        return cast(emitter, count, dtype or INT32)

    def _subgroup(self, name: str, dtype: DType | None, args: Sequence[Value]) -> Value:
        emitter, module = self._emitter, self._emitter.module
        module.capabilities.add(Capability.GroupNonUniform)
        if name in _BUILTINS:
            variable = module.builtin(_BUILTINS[name], emitter.types.id(UINT32))
            value = Value(UINT32, (emitter.pure(Op.Load, emitter.types.id(UINT32), variable),))
            return cast(emitter, value, dtype or INT32)
        if name in _SHUFFLES:
            module.capabilities.add(Capability.GroupNonUniformShuffle)
            lane = cast(emitter, args[1], UINT32).id
            return self._each(args[0], lambda part: (_SHUFFLES[name], part, lane))
        return self._reduction(name, args)

    def _reduction(self, name: str, args: Sequence[Value]) -> Value:
        """Reductions over the subgroup such as `add`, and scans such as `inclusive_add` and `exclusive_add`."""
        scan, _, rest = name.rpartition("_")
        group = {"": Group.Reduce, "inclusive": Group.InclusiveScan, "exclusive": Group.ExclusiveScan}.get(scan)
        if group is None or rest not in _REDUCTIONS:
            raise Unsupported(f"call of {PREFIX}subgroup_{name}")
        self._emitter.module.capabilities.add(Capability.GroupNonUniformArithmetic)
        op = _REDUCTIONS[rest][{"float": 0, "int": 1, "uint": 2}.get(args[0].dtype.kind, 0)]
        if args[0].dtype.kind == "bool":
            raise Unsupported(f"subgroup_{name} of {args[0].dtype}")
        return self._each(args[0], lambda part: (op, group, part))

    def cluster(self, name: str, value: Value, lanes: int) -> Value:
        """`add` or `max` over clusters of adjacent lanes, by shuffles: not every device can reduce clusters."""
        operator = {"add": "Add", "max": "Max"}.get(name)
        if operator is None or lanes < 1 or lanes & (lanes - 1):
            raise Unsupported(f"{name} of clusters of {lanes} lanes")
        step = 1
        while step < lanes:
            other = self._subgroup("shuffle_xor", None, [value, self._emitter.constant(UINT32, step)])
            value, step = binary(self._emitter, operator, value, other), step * 2
        return value

    def _each(self, value: Value, make: Callable[[int], tuple[int, ...]]) -> Value:
        """Apply a subgroup instruction to each part. Its result is never reused: it depends on the active lanes."""
        emitter, parts = self._emitter, []
        self.extended_types |= value.dtype.bits != 32 and value.dtype != DType("float", 64)
        for part, count in zip(value.parts, chunks(value.dtype.lanes)):
            type_id = emitter.types.id(value.dtype.vector(count))
            op, *operands = make(part)
            parts.append(emitter.result(op, type_id, self._scope(), *operands))
        return Value(value.dtype, tuple(parts))

    def _scope(self) -> int:
        return self._emitter.types.constant(UINT32, Scope.Subgroup)
