"""Memory: storage buffers of arguments, shared memory, local arrays of an invocation.

A storage buffer has one binding. Contiguous elements that start at a multiple of 2 or 4 are accessed as vectors, by a
second variable on the same binding. A view with another dtype is one more variable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mlcpipe.compiler.backends.spirv.casts import cast, reinterpret
from mlcpipe.compiler.backends.spirv.emitter import Emitter, Value
from mlcpipe.compiler.backends.spirv.module import Module, instruction
from mlcpipe.compiler.backends.spirv.opcodes import Access, Capability, Decoration, Op, Storage
from mlcpipe.compiler.backends.spirv.types import BOOL, INT32, UINT8, DType, Types, Unsupported

_NATIVE = (1, 2, 4)  # lanes of vectors that have no padding in memory


@dataclass
class Binding:
    """An argument that is a buffer. `once`: nothing writes it while the kernel runs, so loads can be reused."""

    number: int
    name: str
    element: DType
    written: bool
    noalias: bool
    loaded: bool = False
    variables: dict[DType, int] = field(default_factory=dict)  # element as stored -> variable

    @property
    def once(self) -> bool:
        return self.noalias and not self.written


@dataclass(frozen=True)
class Array:
    """Shared memory, or a local array of an invocation."""

    variable: int
    storage: int
    element: DType


@dataclass(frozen=True)
class View:
    """Memory that is accessed as elements of a dtype."""

    memory: Binding | Array
    element: DType


@dataclass(frozen=True)
class Run:
    """`lanes` contiguous elements that start at `base`, a multiple of `aligned` (1, 2 or 4)."""

    base: Value
    lanes: int
    aligned: int


Index = Value | Run  # a scalar index, a vector of indices, or contiguous elements


class Memory:
    """The memory that a function can address. A key is the handle of the Var or Buffer that names the memory."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._types: Types = emitter.types
        self._module: Module = emitter.module
        self.views: dict[int, View] = {}
        self.bindings: list[Binding] = []
        self.local: list[int] = []  # instructions that declare the function's variables
        self.shared_bytes = 0

    def bind(self, key: int, name: str, element: DType, written: bool, noalias: bool) -> None:
        """Add the next argument that is a buffer."""
        binding = Binding(len(self.bindings), name, element, written, noalias)
        self.bindings.append(binding)
        self.views[key] = View(binding, element)

    def view(self, key: int, of: int, element: DType) -> None:
        """Add another name for memory, perhaps with another dtype."""
        if of not in self.views:
            raise Unsupported("a view of memory that is no argument and not allocated in the kernel")
        self.views[key] = View(self.views[of].memory, element)

    def allocate(self, key: int, name: str, scope: str, element: DType, count: int) -> None:
        """Allocate shared memory or a local array of an invocation."""
        storage = {"shared": Storage.Workgroup, "shared.dyn": Storage.Workgroup, "local": Storage.Function}.get(scope)
        if storage is None:
            raise Unsupported(f"memory of scope {scope}")
        allocated = element
        if element.lanes not in _NATIVE:
            element, count = element.scalar, count * element.lanes
        size = self._types.constant(DType("uint", 32), count)
        array = self._module.declare(Op.TypeArray, self._types.id(element), size)
        if storage == Storage.Workgroup:
            variable = self._module.variable(storage, array)
            self.shared_bytes += count * element.nbytes
        else:
            variable = self._module.new_id()
            instruction(self.local, Op.Variable, (self._module.pointer(storage, array), variable, storage))
        self._module.name(variable, name)
        self.views[key] = View(Array(variable, storage, element), allocated)

    # Access

    def load(self, key: int, index: Index) -> Value:
        """The elements at an index. An int64 has 64 bits here, whatever its use."""
        view, index = self._scalars(self._view(key), index)
        element = view.element
        if isinstance(index, Value) and index.dtype.lanes == 1:
            return self._load_one(view, element, index)
        lanes = index.lanes if isinstance(index, Run) else index.dtype.lanes
        if element.lanes > 1:
            raise Unsupported("a vector of indices into memory of vectors")
        width = self._width(view, index)
        if width > 1 and isinstance(index, Run):
            wide = element.vector(width)
            vectors = [self._load_one(view, wide, at) for at in self._steps(index, width)]
            if width == lanes:
                return vectors[0]
            if width == 4 and lanes % 4 == 0:
                return Value(element.vector(lanes), tuple(part for value in vectors for part in value.parts))
            return self._emitter.from_lanes(element.vector(lanes), [i for v in vectors for i in self._emitter.lanes(v)])
        scalars = [self._load_one(view, element, at).id for at in self._indices(index)]
        return self._emitter.from_lanes(element.vector(lanes), scalars)

    def store(self, key: int, index: Index, value: Value) -> None:
        """Store a value with the buffer's dtype, or with int32 in a buffer of int64."""
        view, index = self._scalars(self._view(key), index)
        element = view.element
        value = cast(self._emitter, value, element.vector(value.dtype.lanes))
        if isinstance(index, Value) and index.dtype.lanes == 1:
            self._store_one(view, element, index, value)
            return
        width = self._width(view, index)
        lanes = self._emitter.lanes(value)
        if width > 1 and isinstance(index, Run):
            for i, at in enumerate(self._steps(index, width)):
                part = self._emitter.from_lanes(element.vector(width), lanes[i * width : (i + 1) * width])
                self._store_one(view, element.vector(width), at, part)
            return
        for at, lane in zip(self._indices(index), lanes):
            self._store_one(view, element, at, Value(element, (lane,)))

    def _view(self, key: int) -> View:
        if key not in self.views:
            raise Unsupported("memory that is no argument and not allocated in the kernel")
        return self.views[key]

    def _scalars(self, view: View, index: Index) -> tuple[View, Index]:
        """Convert access to a vector of 3, 8 or 16, which TVM's types of memory allow, to a run of its elements."""
        lanes = view.element.lanes
        if lanes in _NATIVE:
            return view, index
        if not isinstance(index, Value) or index.dtype.lanes > 1:
            raise Unsupported("a vector of indices into memory of vectors")
        first = self._emitter.each(Op.IMul, index.dtype, index, self._emitter.constant(index.dtype, lanes))
        aligned = next(n for n in (4, 2, 1) if lanes % n == 0)
        return View(view.memory, view.element.scalar), Run(first, lanes, aligned)

    def _width(self, view: View, index: Index) -> int:
        """How many lanes one access covers."""
        if not isinstance(index, Run) or isinstance(view.memory, Array) or view.element.kind == "bool":
            return 1
        return next(n for n in (4, 2, 1) if index.aligned % n == 0 and index.lanes % n == 0)

    def _steps(self, run: Run, width: int) -> list[Value]:
        """The indices of a run's vectors."""
        emitter, dtype = self._emitter, run.base.dtype
        shift = emitter.constant(dtype, width.bit_length() - 1)
        op = Op.ShiftRightArithmetic if dtype.kind == "int" else Op.ShiftRightLogical
        first = emitter.each(op, dtype, run.base, shift)
        return [self._plus(first, i) for i in range(run.lanes // width)]

    def _indices(self, index: Index) -> list[Value]:
        """The index of each lane."""
        if isinstance(index, Run):
            return [self._plus(index.base, i) for i in range(index.lanes)]
        return [Value(index.dtype.scalar, (lane,)) for lane in self._emitter.lanes(index)]

    def _plus(self, index: Value, number: int) -> Value:
        if number == 0:
            return index
        return self._emitter.each(Op.IAdd, index.dtype, index, self._emitter.constant(index.dtype, number))

    # One element

    def _load_one(self, view: View, dtype: DType, index: Value) -> Value:
        pointer, stored, once = self._address(view, dtype, index)
        if isinstance(view.memory, Binding):
            view.memory.loaded = True
        type_id = self._types.id(stored, computed=False)
        load: Callable[..., int] = self._emitter.pure if once else self._emitter.result
        value = Value(stored, (load(Op.Load, type_id, pointer, *self.access(view)),))
        if stored == dtype:
            return value
        return cast(self._emitter, value, BOOL) if dtype == BOOL else reinterpret(self._emitter, value, dtype)

    def _store_one(self, view: View, dtype: DType, index: Value, value: Value) -> None:
        pointer, stored, _ = self._address(view, dtype, index)
        if stored != dtype:
            value = (cast if dtype == BOOL else reinterpret)(self._emitter, value, stored)
        self._emitter.emit(Op.Store, pointer, value.id, *self.access(view))

    def pointer(self, key: int, index: Value) -> tuple[int, tuple[int, ...]]:
        """A pointer to an element, and the operands of accesses there."""
        view = self._view(key)
        if isinstance(view.memory, Binding):
            view.memory.loaded = True
        return self._address(view, view.element, index)[0], self.access(view)

    def access(self, view: View) -> tuple[int, ...]:
        """Memory operands of a load or store: Vulkan's memory model needs a flag where other invocations see it."""
        memory = view.memory
        shared = memory.written if isinstance(memory, Binding) else memory.storage == Storage.Workgroup
        return (Access.NonPrivatePointer,) if shared and self._module.vulkan_memory else ()

    def _address(self, view: View, dtype: DType, index: Value) -> tuple[int, DType, bool]:
        """(pointer, dtype of the memory there, whether loads can be reused)."""
        memory = view.memory
        if isinstance(memory, Binding):
            stored = UINT8 if dtype == BOOL else dtype
            variable, zero = self._variable(memory, stored), self._types.constant(INT32, 0)
            pointer = self._module.pointer(Storage.StorageBuffer, self._types.id(stored, computed=False))
            return self._emitter.pure(Op.AccessChain, pointer, variable, zero, index.id), stored, memory.once
        if memory.element.bits * memory.element.lanes != dtype.bits * dtype.lanes:
            raise Unsupported(f"a view of {memory.element} in shared or local memory as {dtype}")
        pointer = self._module.pointer(memory.storage, self._types.id(memory.element))
        return self._emitter.pure(Op.AccessChain, pointer, memory.variable, index.id), memory.element, False

    def _variable(self, binding: Binding, stored: DType) -> int:
        """The variable on a binding with elements of dtype `stored`."""
        variable = binding.variables.get(stored)
        if variable is None:
            variable = binding.variables[stored] = self._module.variable(Storage.StorageBuffer, self._block(stored))
            self._module.decorate(variable, Decoration.DescriptorSet, 0)
            self._module.decorate(variable, Decoration.Binding, binding.number)
            suffix = "" if stored == binding.element else f".{stored}"
            self._module.name(variable, binding.name + suffix)
        return variable

    def _block(self, stored: DType) -> int:
        """The type of a buffer with elements of dtype `stored`: a structure with one runtime array."""
        if stored.bits == 16:
            self._module.capabilities.add(Capability.StorageBuffer16BitAccess)
        if stored.bits == 8:
            self._module.capabilities.add(Capability.StorageBuffer8BitAccess)
            self._module.extensions.add("SPV_KHR_8bit_storage")
        array = self._module.declare(Op.TypeRuntimeArray, self._types.id(stored, computed=False))
        self._module.decorate(array, Decoration.ArrayStride, stored.nbytes)
        block = self._module.declare(Op.TypeStruct, array)
        self._module.decorate(block, Decoration.Block)
        self._module.decorate_member(block, 0, Decoration.Offset, 0)
        return block

    def finish(self) -> None:
        """Decorate the variables of all bindings, once all accesses are known.

        NVIDIA's driver 580 loads from a buffer what was there before a store of the same invocation, unless the buffer
        is coherent. Vulkan's memory model has no such buffers.
        """
        for binding in self.bindings:
            both = binding.written and binding.loaded
            for variable in binding.variables.values():
                if not binding.written:
                    self._module.decorate(variable, Decoration.NonWritable)
                if both and not self._module.vulkan_memory:
                    self._module.decorate(variable, Decoration.Coherent)
                if binding.written and len(binding.variables) > 1:
                    self._module.decorate(variable, Decoration.Aliased)
                elif binding.noalias and not both:
                    self._module.decorate(variable, Decoration.Restrict)
