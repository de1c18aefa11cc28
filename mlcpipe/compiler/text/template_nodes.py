"""The nodes of a chat template's program, described in `mlcpipe/native/runtime/text/template_ops.h`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_RESOLVE, Symbols
from numpy.typing import NDArray

from mlcpipe.errors import TemplateError

# In the order of template_ops.h.
OPS = (
    *("Missing", "None", "True", "False", "Int", "Float", "String", "Load", "Tuple", "List", "Dict", "Cond", "And"),
    *("Or", "Not", "Negative", "Positive", "Binary", "Concat", "Compare", "GetAttr", "GetItem", "Slice", "Call"),
    *("Filter", "Test", "Map", "MapAttr", "Select", "Capture", "Macro", "Fail", "Arguments", "Block", "Data"),
    *("Output", "Set", "If", "For", "Recursive", "Break", "Continue", "Resolve", "Alias", "Clear", "Store"),
    *("StoreAttr", "StoreTuple", "LoopTest"),
)
_OP = {name: index for index, name in enumerate(OPS)}


def not_covered(what: str, line: int | None = None) -> TemplateError:
    return TemplateError(
        "a chat template that the native runtime does not cover",
        where=None if line is None else f"line {line}",
        found=what,
        next_step="use it from Python, or change chat_template in the checkpoint",
    )


class Writer:
    """Collects nodes and strings; a node's operands are added before it."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, int, int]] = []
        self.operands: list[int] = []
        self.strings: dict[str, int] = {"": 0}

    def add(self, op: str, *operands: int) -> int:
        self.nodes.append((_OP[op], len(self.operands), len(operands)))
        self.operands += operands
        return len(self.nodes) - 1

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def block(self, statements: Sequence[int]) -> int:
        return statements[0] if len(statements) == 1 else self.add("Block", *statements)

    def constant(self, value: object, line: int | None = None) -> int:
        """A node of None, a bool, int, float or str."""
        if value is None or isinstance(value, bool):
            return self.add(str(value))
        if isinstance(value, str):
            return self.add("String", self.string(value))
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return self.add("Int", value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF)
        if isinstance(value, float):
            return self.add("Float", *struct.unpack("<II", struct.pack("<d", value)))
        raise not_covered(f"a constant of type {type(value).__name__}", line)

    def arrays(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """The sections of nodes and operands."""
        return np.array(self.nodes, np.uint32).reshape(-1, 3), np.array(self.operands, np.uint32)


@dataclass
class Function:
    """A scope of variables in jinja2's compiled code: the template, a macro, a recursive loop, a condition."""

    outer: Function | None
    level: int  # of its outermost scope
    slots: dict[str, int] = field(default_factory=dict)

    def slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))


@dataclass
class Scope:
    """Names of a scope, as jinja2 tracks them, and the function that it lies in."""

    symbols: Symbols
    function: Function

    def inner(self, *, function: bool = False) -> Scope:
        symbols = Symbols(parent=self.symbols)
        return Scope(symbols, Function(self.function, symbols.level) if function else self.function)

    def analyzed(self, analyze: Callable[[Symbols], None]) -> Scope:
        analyze(self.symbols)
        return self

    def place(self, variable: str) -> tuple[int, int]:
        """How many functions outward, and the slot there, of one of jinja2's variables, `l_LEVEL_NAME`."""
        level, hops, function = int(variable.split("_")[1]), 0, self.function
        while level < function.level and function.outer is not None:
            hops, function = hops + 1, function.outer
        return hops, function.slot(variable)

    def find(self, name: str) -> tuple[int, int]:
        return self.place(self.symbols.ref(name))

    def own(self, name: str) -> int:
        """The slot of a name that is assigned here."""
        hops, slot = self.find(name)
        if hops:
            raise AssertionError(f"{name} belongs to another function")
        return slot

    def enter(self, writer: Writer) -> list[int]:
        """Statements that give the scope's names their first values."""
        made, undefined = [], []
        for variable, (action, source) in self.symbols.loads.items():
            slot = self.place(variable)[1]
            if action == VAR_LOAD_RESOLVE:
                made.append(writer.add("Resolve", slot, writer.string(source)))
            elif action == VAR_LOAD_ALIAS:
                made.append(writer.add("Alias", slot, *self.place(source)))
            elif action == "undefined":
                undefined.append(slot)
        return [*made, writer.add("Clear", *undefined)] if undefined else made

    def leave(self, writer: Writer) -> list[int]:
        """Statements that forget the scope's names."""
        slots = [self.place(variable)[1] for variable in self.symbols.loads]
        return [writer.add("Clear", *slots)] if slots else []
