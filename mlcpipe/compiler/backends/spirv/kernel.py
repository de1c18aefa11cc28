"""Converts one device function of TVM to a SPIR-V module and the interface that a host needs to launch it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mlcpipe.compiler.backends.spirv.casts import cast
from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.expressions import Expressions, Widen
from mlcpipe.compiler.backends.spirv.matrices import declare_matrices
from mlcpipe.compiler.backends.spirv.memory import Memory
from mlcpipe.compiler.backends.spirv.module import Module
from mlcpipe.compiler.backends.spirv.opcodes import BuiltIn, Capability, Decoration, Op, Storage
from mlcpipe.compiler.backends.spirv.statements import Facts, Statements
from mlcpipe.compiler.backends.spirv.types import BOOL, UINT32, DType, Unsupported, integer, parse
from mlcpipe.errors import CompileError
from mlcpipe.passes.lowering import ANY_GRID

ENTRY = "main"
# Minimum limits of a device: https://registry.khronos.org/vulkan/specs/1.2/html/vkspec.html#limits-minmax
_PUSH_CONSTANT_BYTES = 128
# Capability -> the device feature that it needs.
_FEATURES = {
    Capability.Float16: "shaderFloat16",
    Capability.Float64: "shaderFloat64",
    Capability.Int8: "shaderInt8",
    Capability.Int16: "shaderInt16",
    Capability.Int64: "shaderInt64",
    Capability.StorageBuffer8BitAccess: "storageBuffer8BitAccess",
    Capability.StorageBuffer16BitAccess: "storageBuffer16BitAccess",
    Capability.VulkanMemoryModel: "vulkanMemoryModel",
    Capability.CooperativeMatrixKHR: "cooperativeMatrix",
    Capability.GroupNonUniform: "subgroupBasic",
    Capability.GroupNonUniformArithmetic: "subgroupArithmetic",
    Capability.GroupNonUniformShuffle: "subgroupShuffle",
}


@dataclass(frozen=True)
class BufferArgument:
    """A buffer; the i-th one is binding i of set 0. `arg`: index of the argument."""

    arg: int
    write: bool
    dtype: str


@dataclass(frozen=True)
class ScalarArgument:
    """A number at `offset` in the push constants, where it has the dtype `stored`."""

    arg: int
    dtype: str
    stored: str
    offset: int


@dataclass(frozen=True)
class Kernel:
    """A SPIR-V module and its interface.

    `grid_base`: offset in the push constants of a dispatch's first workgroup index in x (uint32), None if one dispatch
    always covers the grid.
    """

    name: str
    code: bytes
    buffers: tuple[BufferArgument, ...]
    scalars: tuple[ScalarArgument, ...]
    grid_base: int | None
    push_constant_bytes: int
    workgroup: tuple[int, int, int]
    launch_params: tuple[str, ...]
    shared_bytes: int
    subgroup_size: int
    features: tuple[str, ...]


def compile_kernel(func: Any, name: str) -> Kernel:
    """Compile a device function after TVM's passes. Raises CompileError that names an unsupported construct."""
    widened: set[int] = set()
    try:
        while True:
            try:
                return _Function(func, name, widened).compile()
            except Widen as request:
                widened.add(request.key)
    except Unsupported as error:
        raise CompileError(
            "kernel cannot be written as SPIR-V", where=name, found=error, next_step="write its schedule without it"
        ) from error


class _Function:
    """Converts one function."""

    def __init__(self, func: Any, name: str, widened: Collection[int]) -> None:
        self._func = func
        self._name = name
        self._facts = Facts()
        self._facts.scan(func.body)
        self._emitter = Emitter(Module())
        self._module = self._emitter.module
        if self._facts.has_matrices:
            declare_matrices(self._module)
        self._memory = Memory(self._emitter)
        self._values = Expressions(self._emitter, self._memory, widened)
        self._buffers: list[BufferArgument] = []
        self._scalars: list[ScalarArgument] = []
        self._grid_base: int | None = None
        self._bytes = 0  # size of the push constants so far
        self._base: Value | None = None

    def compile(self) -> Kernel:
        self._module.source(self._name)
        self._arguments()
        threads: dict[str, Callable[[], Value]] = {}
        for i, axis in enumerate("xyz"):
            threads[f"blockIdx.{axis}"] = self._reader(BuiltIn.WorkgroupId, i)
            threads[f"threadIdx.{axis}"] = self._reader(BuiltIn.LocalInvocationId, i)
        threads["blockIdx.x"] = self._block_x
        Statements(self._values, threads, has_barriers=self._facts.has_barriers)(self._func.body)
        self._emitter.emit(Op.Return)
        self._memory.finish()
        self._values.intrinsics.finish(any(b.written and b.loaded for b in self._memory.bindings))
        self._emitter.types.finish()
        size = self._workgroup()
        code = self._module.assemble(ENTRY, size, self._emitter.first, self._memory.local, self._emitter.code)
        return Kernel(
            self._name,
            code,
            tuple(self._buffers),
            tuple(self._scalars),
            self._grid_base,
            self._bytes,
            size,
            tuple(str(tag) for tag in self._func.attrs["tirx.kernel_launch_params"]),
            self._memory.shared_bytes,
            self._values.intrinsics.subgroup_size,
            self._features(),
        )

    def _features(self) -> tuple[str, ...]:
        features = [_FEATURES[c] for c in sorted(self._module.capabilities) if c in _FEATURES]
        features += ["shaderSubgroupExtendedTypes"] if self._values.intrinsics.extended_types else []
        return (*features, *self._values.matrices.features)

    # Arguments

    def _arguments(self) -> None:
        """Bind buffers; put numbers into the push constants, each at a multiple of its size."""
        noalias = bool(self._func.attrs.get("tirx.noalias", False))
        numbers: list[tuple[Any, DType, DType]] = []
        for index, param in enumerate(self._func.params):
            element = getattr(param.ty, "element_type", None)
            if element is not None:
                dtype = parse(str(element.dtype))
                written = param.__chandle__() in self._facts.written
                name = self._facts.names.get(param.__chandle__()) or f"buffer{index}"
                self._memory.bind(param.__chandle__(), name, dtype, written, noalias)
                self._buffers.append(BufferArgument(index, written, str(dtype)))
                continue
            dtype = parse(str(param.ty.dtype))
            stored = _stored(dtype)
            numbers.append((param, dtype, stored))
            self._scalars.append(ScalarArgument(index, str(dtype), str(stored), self._allocate(stored)))
        if self._needs_base():
            self._grid_base = self._allocate(UINT32)
        if self._bytes > _PUSH_CONSTANT_BYTES:
            count = len(self._scalars)
            raise Unsupported(f"{count} numbers as arguments, {self._bytes} bytes; {_PUSH_CONSTANT_BYTES} are possible")
        self._load_push_constants(numbers)

    def _allocate(self, dtype: DType) -> int:
        """Allocate one more number in the push constants; return its offset."""
        offset = -(-self._bytes // dtype.nbytes) * dtype.nbytes
        self._bytes = offset + dtype.nbytes
        return offset

    def _load_push_constants(self, numbers: list[tuple[Any, DType, DType]]) -> None:
        members = [(stored, scalar.offset) for (_, _, stored), scalar in zip(numbers, self._scalars)]
        if self._grid_base is not None:
            members.append((UINT32, self._grid_base))
        if not members:
            return
        types = self._emitter.types
        block = self._module.declare_new(Op.TypeStruct, *[types.id(stored) for stored, _ in members])
        self._module.decorate(block, Decoration.Block)
        for i, (_, offset) in enumerate(members):
            self._module.decorate_member(block, i, Decoration.Offset, offset)
        variable = self._module.variable(Storage.PushConstant, block)
        loaded = []
        for i, (stored, _) in enumerate(members):
            type_id = types.id(stored)
            pointer = self._module.pointer(Storage.PushConstant, type_id)
            at = self._emitter.pure(Op.AccessChain, pointer, variable, types.constant(UINT32, i))
            loaded.append(Value(stored, (self._emitter.pure(Op.Load, type_id, at),)))
        for (param, dtype, _), value in zip(numbers, loaded):
            self._module.name(value.id, str(param.name))
            # int64 stays in 32 bits: the host refuses larger sizes
            self._values.env[param.__chandle__()] = value if dtype.bits == 64 else cast(self._emitter, value, dtype)
        if self._grid_base is not None:
            self._base = loaded[-1]

    # Launch

    def _reader(self, builtin: int, axis: int) -> Callable[[], Value]:
        def read() -> Value:
            triple = self._emitter.types.id(UINT32.vector(3))
            variable = self._module.builtin(builtin, triple)
            loaded = self._emitter.pure(Op.Load, triple, variable)
            type_id = self._emitter.types.id(UINT32)
            return Value(UINT32, (self._emitter.pure(Op.CompositeExtract, type_id, loaded, axis),))

        return read

    def _block_x(self) -> Value:
        """The workgroup index in x. A grid larger than a device's limit is several dispatches, each with its base."""
        index = self._reader(BuiltIn.WorkgroupId, 0)()
        return index if self._base is None else self._emitter.each(Op.IAdd, UINT32, index, self._base)

    def _needs_base(self) -> bool:
        if "blockIdx.x" not in self._facts.extents:
            return False
        extent = integer(self._facts.extents["blockIdx.x"])
        return extent is None or extent >= ANY_GRID

    def _workgroup(self) -> tuple[int, int, int]:
        sizes = []
        for axis in "xyz":
            tag = f"threadIdx.{axis}"
            extent = integer(self._facts.extents[tag]) if tag in self._facts.extents else 1
            if extent is None:
                raise Unsupported(f"a workgroup whose size in {axis} is only known at run time")
            sizes.append(extent)
        return sizes[0], sizes[1], sizes[2]


def _stored(dtype: DType) -> DType:
    """The dtype of an argument in the push constants: sizes have 32 bits, narrow numbers are widened."""
    if dtype == BOOL:
        return UINT32
    if dtype == DType("int", 64):
        return DType("int", 32)
    return dtype if dtype.bits >= 32 else DType(dtype.kind, 32)
