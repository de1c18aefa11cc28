"""A SPIR-V module under construction: ids, unique declarations, and sections in the format's order.

SPIR-V specification, 2.3 (physical layout) and 2.4 (logical layout).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from mlcpipe.compiler.backends.spirv.opcodes import Capability, Decoration, Op, Storage

_MAGIC = 0x07230203
_VERSION = 0x00010300  # SPIR-V 1.3, which Vulkan 1.1 accepts
_GLSL450 = 1
_VULKAN = 3
_LOGICAL = 0
_GLCOMPUTE = 5
_LOCAL_SIZE = 17


def instruction(out: list[int], op: int, operands: Iterable[int]) -> None:
    """Append an instruction."""
    at = len(out)
    out.append(0)
    out.extend(operands)
    out[at] = (len(out) - at) << 16 | op


def string_words(text: str) -> tuple[int, ...]:
    """The 32-bit words of a zero-terminated UTF-8 string."""
    raw = text.encode()
    raw += b"\0" * (4 - len(raw) % 4)
    return struct.unpack(f"<{len(raw) // 4}I", raw)


class Module:
    """The sections of a module with one entry point."""

    def __init__(self) -> None:
        self.last_id = 0
        self.capabilities = {Capability.Shader}
        self.extensions: set[str] = set()
        self.interface: list[int] = []  # Input variables that the entry point uses
        self._declared: dict[tuple[int | str, ...], int] = {}
        self._sources: list[int] = []
        self._names: list[int] = []
        self._decorations: list[int] = []
        self._decorated: set[tuple[int, ...]] = set()
        self._declarations: list[int] = []
        self.glsl = self.new_id()

    @property
    def vulkan_memory(self) -> bool:
        """Whether the module uses Vulkan's memory model: accesses are private unless their operands say otherwise."""
        return Capability.VulkanMemoryModel in self.capabilities

    def new_id(self) -> int:
        """An unused id."""
        self.last_id += 1
        return self.last_id

    def declare(self, op: int, *operands: int) -> int:
        """The id of a type: the same for the same operands."""
        key = (op, *operands)
        type_id = self._declared.get(key)
        if type_id is None:
            type_id = self._declared[key] = self.declare_new(op, *operands)
        return type_id

    def declare_new(self, op: int, *operands: int) -> int:
        """The id of a new type: structures with the same members may have different decorations."""
        type_id = self.new_id()
        instruction(self._declarations, op, (type_id, *operands))
        return type_id

    def constant(self, op: int, type_id: int, *operands: int) -> int:
        """The id of a constant: the same for the same type and operands."""
        key = (op, type_id, *operands)
        constant_id = self._declared.get(key)
        if constant_id is None:
            constant_id = self._declared[key] = self.new_id()
            instruction(self._declarations, op, (type_id, constant_id, *operands))
        return constant_id

    def constant_as(self, constant_id: int, type_id: int, *operands: int) -> None:
        """Declare a constant whose id is in use already."""
        instruction(self._declarations, Op.Constant, (type_id, constant_id, *operands))

    def variable(self, storage: int, type_id: int) -> int:
        """The id of a new module-scope variable."""
        variable = self.new_id()
        instruction(self._declarations, Op.Variable, (self.pointer(storage, type_id), variable, storage))
        return variable

    def pointer(self, storage: int, type_id: int) -> int:
        """The id of a pointer type."""
        return self.declare(Op.TypePointer, storage, type_id)

    def builtin(self, number: int, type_id: int) -> int:
        """The id of a built-in's variable."""
        key = ("builtin", number)
        variable = self._declared.get(key)
        if variable is None:
            variable = self._declared[key] = self.variable(Storage.Input, type_id)
            self.decorate(variable, Decoration.BuiltIn, number)
            self.interface.append(variable)
        return variable

    def decorate(self, target: int, decoration: int, *operands: int) -> None:
        """Decorate an id, once."""
        self._annotate(Op.Decorate, target, decoration, *operands)

    def decorate_member(self, target: int, member: int, decoration: int, *operands: int) -> None:
        """Decorate a member of a structure, once."""
        self._annotate(Op.MemberDecorate, target, member, decoration, *operands)

    def _annotate(self, op: int, *operands: int) -> None:
        if (op, *operands) not in self._decorated:
            self._decorated.add((op, *operands))
            instruction(self._decorations, op, operands)

    def name(self, target: int, text: str) -> None:
        """Name an id, for debuggers."""
        instruction(self._names, Op.Name, (target, *string_words(text)))

    def source(self, text: str) -> int:
        """Name the source of the code; return the id of that string."""
        string_id = self.new_id()
        instruction(self._sources, Op.String, (string_id, *string_words(text)))
        instruction(self._sources, Op.Source, (0, 0, string_id))
        return string_id

    def assemble(self, entry: str, size: Iterable[int], first: int, local: list[int], body: list[int]) -> bytes:
        """The binary of a module with one function.

        Its block `first` declares the variables `local`; `body` follows and ends with OpReturn.
        """
        void = self.declare(Op.TypeVoid)
        signature = self.declare(Op.TypeFunction, void)
        function = self.new_id()
        out: list[int] = []
        for capability in sorted(self.capabilities):
            instruction(out, Op.Capability, (capability,))
        for extension in sorted(self.extensions):
            instruction(out, Op.Extension, string_words(extension))
        instruction(out, Op.ExtInstImport, (self.glsl, *string_words("GLSL.std.450")))
        instruction(out, Op.MemoryModel, (_LOGICAL, _VULKAN if self.vulkan_memory else _GLSL450))
        instruction(out, Op.EntryPoint, (_GLCOMPUTE, function, *string_words(entry), *self.interface))
        instruction(out, Op.ExecutionMode, (function, _LOCAL_SIZE, *size))
        out += self._sources + self._names + self._decorations + self._declarations
        instruction(out, Op.Function, (void, function, 0, signature))
        instruction(out, Op.Label, (first,))
        out += local + body
        instruction(out, Op.FunctionEnd, ())
        words = [_MAGIC, _VERSION, 0, self.last_id + 1, 0, *out]
        return struct.pack(f"<{len(words)}I", *words)
