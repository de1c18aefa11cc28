"""Calls: elementary functions, subgroups, dot products of packed int8, barriers.

Schedules reach what TensorIR has no operator for by calls of external functions, `tir_schedules.gpu.device_calls`; the
names of elementary functions come from `lowering`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlcpipe.compiler.spirv.arithmetic import binary
from mlcpipe.compiler.spirv.casts import cast, reinterpret, resized
from mlcpipe.compiler.spirv.emitter import Emitter, Value
from mlcpipe.compiler.spirv.opcodes import BuiltIn, Capability, Glsl, Group, Op, Scope, Semantics
from mlcpipe.compiler.spirv.types import BOOL, INT32, UINT32, DType, Unsupported, chunks

PREFIX = "mlcpipe."

# Functions of floats; those of _ANY_FLOAT are defined for 64 bits too.
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
# Operators of TensorIR that arrive as calls.
CALLED_OPERATORS = {
    "bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor", "shift_left": "LShift",
    "shift_right": "RShift", "fmod": "Mod", "min": "Min", "max": "Max",
}  # fmt: skip
_OTHERS = ("bitwise_not", "isnan", "isinf", "abs", "popcount", "clz")
# Name -> instruction on floats, signed and unsigned integers.
_REDUCTIONS: dict[str, tuple[int | None, int, int]] = {
    "add": (Op.GroupNonUniformFAdd, Op.GroupNonUniformIAdd, Op.GroupNonUniformIAdd),
    "mul": (Op.GroupNonUniformFMul, Op.GroupNonUniformIMul, Op.GroupNonUniformIMul),
    "min": (Op.GroupNonUniformFMin, Op.GroupNonUniformSMin, Op.GroupNonUniformUMin),
    "max": (Op.GroupNonUniformFMax, Op.GroupNonUniformSMax, Op.GroupNonUniformUMax),
    "and": (None, Op.GroupNonUniformBitwiseAnd, Op.GroupNonUniformBitwiseAnd),
    "or": (None, Op.GroupNonUniformBitwiseOr, Op.GroupNonUniformBitwiseOr),
    "xor": (None, Op.GroupNonUniformBitwiseXor, Op.GroupNonUniformBitwiseXor),
}
_SHUFFLES = {
    "shuffle": (Op.GroupNonUniformShuffle, Capability.GroupNonUniformShuffle),
    "shuffle_xor": (Op.GroupNonUniformShuffleXor, Capability.GroupNonUniformShuffle),
    "shuffle_up": (Op.GroupNonUniformShuffleUp, Capability.GroupNonUniformShuffleRelative),
    "shuffle_down": (Op.GroupNonUniformShuffleDown, Capability.GroupNonUniformShuffleRelative),
}
_BUILTINS = {
    "size": BuiltIn.SubgroupSize,
    "lane": BuiltIn.SubgroupLocalInvocationId,
    "id": BuiltIn.SubgroupId,
    "count": BuiltIn.NumSubgroups,
}
_VOTES = {"any": Op.GroupNonUniformAny, "all": Op.GroupNonUniformAll}
# Name -> (instruction, kinds of the two operands and of the result).
_DOTS = {
    "dot4_i8": (Op.SDot, INT32, INT32, INT32),
    "dot4_u8": (Op.UDot, UINT32, UINT32, UINT32),
    "dot4_i8u8": (Op.SUDot, INT32, UINT32, INT32),
}
_PACKED_4X8 = 0
# TVM's own names for shuffles: (mask, value, lane or delta, width, warp size).
_WARP = {"tvm_warp_shuffle": "shuffle", "tvm_warp_shuffle_up": "shuffle_up", "tvm_warp_shuffle_down": "shuffle_down"}


class Intrinsics:
    """Calls whose arguments are computed values."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self.subgroup_size = 0  # that the kernel needs, 0: any
        self.extended_types = False  # operations of the subgroup on others than 32 bits and float64
        self._semantics = 0  # constant of all barriers, which is known when all loads are

    def knows(self, name: str) -> bool:
        """Whether `call` may know a function."""
        own = name[len(PREFIX) :] if name.startswith(PREFIX) else ""
        return (
            name in _FLOATS or name in _ANY_FLOAT or name in _OTHERS or name in _WARP
            or own.startswith("subgroup_") or own in _DOTS or own == "half_pair"
        )  # fmt: skip

    def call(self, name: str, dtype: DType | None, args: Sequence[Value]) -> Value | None:
        """The result of a call; None of one that has none. `dtype` as the call states it."""
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
        if name in _WARP:
            return self._subgroup(_WARP[name], dtype, [args[1], args[2]])
        if name.startswith(PREFIX + "subgroup_"):
            return self._subgroup(name[len(PREFIX + "subgroup_") :], dtype, args)
        if name[len(PREFIX) :] in _DOTS and name.startswith(PREFIX):
            return self._dot(name[len(PREFIX) :], args)
        if name == PREFIX + "half_pair":
            both = emitter.from_lanes(DType("float", 32, 2), [arg.id for arg in args])
            return reinterpret(emitter, cast(emitter, both, DType("float", 16, 2)), UINT32)
        raise Unsupported(f"call of {name}")

    def barrier(self, scope: str) -> None:
        """Wait for the workgroup (`shared`) or the subgroup (`warp`), and see what they stored."""
        if scope not in ("shared", "shared.dyn", "warp"):
            raise Unsupported(f"barrier of scope {scope}")
        where = self._emitter.types.constant(UINT32, Scope.Subgroup if scope == "warp" else Scope.Workgroup)
        self._semantics = self._semantics or self._emitter.module.new_id()
        self._emitter.emit(Op.ControlBarrier, where, where, self._semantics)

    def finish(self, device_memory: bool) -> None:
        """Declare what barriers order: shared memory, and buffers where a kernel reads what it writes."""
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
        """Vulkan counts bits of 32-bit integers only."""
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

    def _dot(self, name: str, args: Sequence[Value]) -> Value:
        """a . b + c of four 8-bit integers in each word (SPV_KHR_integer_dot_product)."""
        emitter = self._emitter
        op, *kinds = _DOTS[name]
        emitter.module.capabilities |= {Capability.DotProduct, Capability.DotProductInput4x8BitPacked}
        emitter.module.extensions.add("SPV_KHR_integer_dot_product")
        a, b = (cast(emitter, value, kind) for value, kind in zip(args[:2], kinds))
        result = Value(kinds[2], (emitter.pure(op, emitter.types.id(kinds[2]), a.id, b.id, _PACKED_4X8),))
        return binary(emitter, "Add", cast(emitter, result, args[2].dtype), args[2])

    def _subgroup(self, name: str, dtype: DType | None, args: Sequence[Value]) -> Value | None:
        emitter, module = self._emitter, self._emitter.module
        module.capabilities.add(Capability.GroupNonUniform)
        if name == "barrier":
            self.barrier("warp")
            return None
        if name in _BUILTINS:
            variable = module.builtin(_BUILTINS[name], emitter.types.id(UINT32))
            value = Value(UINT32, (emitter.pure(Op.Load, emitter.types.id(UINT32), variable),))
            return cast(emitter, value, dtype or INT32)
        if name in _VOTES:
            module.capabilities.add(Capability.GroupNonUniformVote)
            return Value(BOOL, (emitter.result(_VOTES[name], emitter.boolean(), self._scope(), args[0].id),))
        if name == "broadcast_first":
            module.capabilities.add(Capability.GroupNonUniformBallot)
            return self._each(args[0], lambda part: (Op.GroupNonUniformBroadcastFirst, part))
        if name in _SHUFFLES or name == "broadcast":  # OpGroupNonUniformBroadcast takes constants only before 1.5
            op, capability = _SHUFFLES["shuffle" if name == "broadcast" else name]
            module.capabilities.add(capability)
            lane = cast(emitter, args[1], UINT32).id
            return self._each(args[0], lambda part: (op, part, lane))
        return self._reduction(name, args)

    def _reduction(self, name: str, args: Sequence[Value]) -> Value:
        """`add` and the like of the subgroup; `inclusive_add`, `exclusive_add`."""
        scan, _, rest = name.rpartition("_")
        group = {"": Group.Reduce, "inclusive": Group.InclusiveScan, "exclusive": Group.ExclusiveScan}.get(scan)
        if group is None or rest not in _REDUCTIONS:
            raise Unsupported(f"call of {PREFIX}subgroup_{name}")
        self._emitter.module.capabilities.add(Capability.GroupNonUniformArithmetic)
        op = _REDUCTIONS[rest][{"float": 0, "int": 1, "uint": 2}.get(args[0].dtype.kind, 0)]
        if op is None or args[0].dtype.kind == "bool":
            raise Unsupported(f"subgroup_{name} of {args[0].dtype}")
        return self._each(args[0], lambda part: (op, group, part))

    def cluster(self, name: str, value: Value, lanes: int) -> Value:
        """`add`, `min` or `max` of so many neighbouring lanes, by shuffles: not every device has clusters."""
        operator = {"add": "Add", "min": "Min", "max": "Max"}.get(name)
        if operator is None or lanes < 1 or lanes & (lanes - 1):
            raise Unsupported(f"{name} of clusters of {lanes} lanes")
        step = 1
        while step < lanes:
            other = self._subgroup("shuffle_xor", None, [value, self._emitter.constant(UINT32, step)])
            assert other is not None
            value, step = binary(self._emitter, operator, value, other), step * 2
        return value

    def _each(self, value: Value, make: Callable[[int], tuple[int, ...]]) -> Value:
        """An instruction of the subgroup on each part: never numbered, for its value depends on who takes part."""
        emitter, parts = self._emitter, []
        self.extended_types |= value.dtype.bits != 32 and value.dtype != DType("float", 64)
        for part, count in zip(value.parts, chunks(value.dtype.lanes)):
            type_id = emitter.types.id(value.dtype.vector(count))
            op, *operands = make(part)
            parts.append(emitter.result(op, type_id, self._scope(), *operands))
        return Value(value.dtype, tuple(parts))

    def _scope(self) -> int:
        return self._emitter.types.constant(UINT32, Scope.Subgroup)
