"""A module of SPIR-V as it grows: ids, declarations that stand once, and the sections in the order of the format.

SPIR-V specification, 2.3 (physical layout) and 2.4 (logical layout).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from mlcpipe.compiler.spirv.opcodes import Capability, Decoration, Op, Storage

_MAGIC = 0x07230203
_VERSION = 0x00010300  # SPIR-V 1.3, which Vulkan 1.1 takes
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
    """A string as UTF-8 with an end of zero bytes, in words."""
    raw = text.encode()
    raw += b"\0" * (4 - len(raw) % 4)
    return struct.unpack(f"<{len(raw) // 4}I", raw)


class Module:
    """The sections of a module with one entry point."""

    def __init__(self) -> None:
        self.last_id = 0
        self.capabilities = {Capability.Shader}
        self.extensions: set[str] = set()
        self.interface: list[int] = []  # variables of storage class Input that the entry point uses
        self._declared: dict[tuple[int | str, ...], int] = {}
        self._sources: list[int] = []
        self._names: list[int] = []
        self._decorations: list[int] = []
        self._decorated: set[tuple[int, ...]] = set()
        self._declarations: list[int] = []
        self.glsl = self.new_id()

    @property
    def vulkan_memory(self) -> bool:
        """Whether memory is as in Vulkan's memory model: private to an invocation, unless an access says otherwise."""
        return Capability.VulkanMemoryModel in self.capabilities

    def new_id(self) -> int:
        """An id that nothing has yet."""
        self.last_id += 1
        return self.last_id

    def declare(self, op: int, *operands: int) -> int:
        """The id of a type: the same for the same operands."""
        key = (op, *operands)
        found = self._declared.get(key)
        if found is None:
            found = self._declared[key] = self.declare_new(op, *operands)
        return found

    def declare_new(self, op: int, *operands: int) -> int:
        """A type of its own, as structures are that differ only in their decorations."""
        made = self.new_id()
        instruction(self._declarations, op, (made, *operands))
        return made

    def constant(self, op: int, type_id: int, *operands: int) -> int:
        """The id of a constant: the same for the same type and operands."""
        key = (op, type_id, *operands)
        found = self._declared.get(key)
        if found is None:
            found = self._declared[key] = self.new_id()
            instruction(self._declarations, op, (type_id, found, *operands))
        return found

    def constant_as(self, made: int, type_id: int, *operands: int) -> None:
        """A constant whose id is in use already."""
        instruction(self._declarations, Op.Constant, (type_id, made, *operands))

    def variable(self, storage: int, type_id: int) -> int:
        """A variable outside functions."""
        made = self.new_id()
        instruction(self._declarations, Op.Variable, (self.pointer(storage, type_id), made, storage))
        return made

    def pointer(self, storage: int, type_id: int) -> int:
        """The type of pointers to a type in a storage class."""
        return self.declare(Op.TypePointer, storage, type_id)

    def builtin(self, number: int, type_id: int) -> int:
        """The variable that is a built-in."""
        key = ("builtin", number)
        found = self._declared.get(key)
        if found is None:
            found = self._declared[key] = self.variable(Storage.Input, type_id)
            self.decorate(found, Decoration.BuiltIn, number)
            self.interface.append(found)
        return found

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
        """The name of an id, for debuggers."""
        instruction(self._names, Op.Name, (target, *string_words(text)))

    def source(self, text: str) -> int:
        """A string that names where the code comes from."""
        made = self.new_id()
        instruction(self._sources, Op.String, (made, *string_words(text)))
        instruction(self._sources, Op.Source, (0, 0, made))
        return made

    def assemble(self, entry: str, size: Iterable[int], first: int, local: list[int], body: list[int]) -> bytes:
        """The module with one function: in its block `first` the variables `local`, then `body` up to OpReturn."""
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
