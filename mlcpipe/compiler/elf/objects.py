"""Reads relocatable ELF files: the sections that are loaded, their symbols and relocations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CompileError

ALLOC, WRITE, EXECUTE, TLS = 0x2, 0x1, 0x4, 0x400  # sh_flags
NOBITS, INIT_ARRAY, FINI_ARRAY = 8, 14, 15  # sh_type
LOCAL, GLOBAL, WEAK = 0, 1, 2  # bindings
HIDDEN = 2  # the least visibility that nobody else sees; 1, internal, is hidden too
THREAD_SYMBOL = 6  # a symbol's type
_RELA, _GROUP, _SYMTAB = 4, 17, 2
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00
_MOST_ALIGN, _MOST_BYTES = 1 << 12, 1 << 31  # a page, whose place the loader keeps
_HEADER = np.dtype([
    ("magic", "S16"), ("type", "<u2"), ("machine", "<u2"), ("rest", "V20"), ("sections_at", "<u8"), ("flags", "<u4"),
    ("sizes", "<u2", 3), ("entry", "<u2"), ("count", "<u2"), ("names", "<u2"),
])  # fmt: skip
_SECTION = np.dtype([
    ("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8"), ("size", "<u8"),
    ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8"),
])  # fmt: skip
SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])


@dataclass(eq=False)
class Section:
    """A section that is loaded. `address` is set by the layout."""

    name: str
    type: int
    flags: int
    align: int
    content: bytes  # none of NOBITS
    nbytes: int
    relocations: list[tuple[int, int, Symbol, int]] = field(default_factory=list)  # offset, type, symbol, addend
    address: int = 0

    @property
    def is_frames(self) -> bool:
        """How to leave functions by an exception."""
        return self.name == ".eh_frame"

    @property
    def is_data(self) -> bool:
        """Writable data that all threads share, but lists of functions."""
        return bool(self.flags & WRITE) and not self.flags & TLS and self.type not in (INIT_ARRAY, FINI_ARRAY)

    @property
    def priority(self) -> int:
        """The order among lists of functions: lower numbers first, and lists without a number last."""
        number = self.name.rpartition(".")[2]
        return int(number) if number.isdigit() else 1 << 16

    @property
    def is_constant(self) -> bool:
        """Whether data stays as the loader leaves it."""
        return self.name.startswith(".data.rel.ro")


@dataclass(eq=False)
class Symbol:
    """A symbol; `section` is None for one that is not defined, or has an absolute value (`defined`)."""

    name: str
    binding: int
    type: int
    visibility: int
    section: Section | None = None
    value: int = 0
    nbytes: int = 0
    defined: bool = False

    @property
    def address(self) -> int:
        """Where it is, once sections have their addresses."""
        return self.value + (self.section.address if self.section is not None else 0)

    @property
    def exported(self) -> bool:
        """Whether users of the library see it."""
        return self.defined and self.binding != LOCAL and self.visibility not in (1, HIDDEN)


def read_objects(paths: Iterable[Path]) -> tuple[int, list[Section], list[Symbol]]:
    """The machine of object files, their sections, and their global symbols, each name's once.

    Raises CompileError for anything but object files for one machine, and for a name with two strong definitions.
    """
    machine, sections, symbols = 0, list[Section](), dict[str, Symbol]()
    for path in paths:
        try:
            found, own = _read(path.read_bytes(), symbols)
        except (ValueError, IndexError, OverflowError) as error:
            raise CompileError("a broken object file", where=path.name, found=error) from error
        if machine not in (0, found):
            raise CompileError("object files for several machines", where=path.name, found=f"{found} beside {machine}")
        machine, sections = found, sections + own
    return machine, sections, list(symbols.values())


def _read(content: bytes, symbols: dict[str, Symbol]) -> tuple[int, list[Section]]:
    header = np.frombuffer(content, _HEADER, 1)[0]
    if content[:6] != b"\x7fELF\x02\x01" or header["type"] != 1:
        raise ValueError("no relocatable ELF file of 64 bits, little-endian")
    heads = _table(content, _SECTION, int(header["sections_at"]), int(header["count"]) * _SECTION.itemsize)
    names = _part(content, heads[int(header["names"])])
    sections: dict[int, Section] = {}
    for index, head in enumerate(heads):
        if head["type"] == _GROUP:
            raise ValueError("a group of sections")
        if int(head["flags"]) & ALLOC:
            if head["align"] > _MOST_ALIGN or head["size"] > _MOST_BYTES:
                raise ValueError("a section's size or alignment")
            data = b"" if head["type"] == NOBITS else _part(content, head)
            sections[index] = Section(
                _text(names, int(head["name"])), int(head["type"]), int(head["flags"]), max(1, int(head["align"])),
                data, int(head["size"]),
            )  # fmt: skip
    table = next((head for head in heads if head["type"] == _SYMTAB), None)
    own = [] if table is None else _symbols(content, table, _part(content, heads[int(table["link"])]), sections)
    known = [symbol if symbol.binding == LOCAL else _merged(symbol, symbols) for symbol in own]
    for head in heads:
        target = sections.get(int(head["info"]))
        if head["type"] == _RELA and target is not None:
            places = _table(content, RELOCATION, int(head["offset"]), int(head["size"]))["offset"]
            if places.size and places.max() >= target.nbytes:
                raise ValueError("a relocation beyond its section")
            target.relocations += [
                (offset, kind, known[symbol], addend)
                for offset, kind, symbol, addend in _table(
                    content, RELOCATION, int(head["offset"]), int(head["size"])
                ).tolist()
            ]
    return int(header["machine"]), list(sections.values())


def _symbols(content: bytes, head: np.void, names: bytes, sections: dict[int, Section]) -> list[Symbol]:
    found = []
    for name, info, other, index, value, nbytes in _table(
        content, SYMBOL, int(head["offset"]), int(head["size"])
    ).tolist():
        if index >= _RESERVED and index != _ABSOLUTE:
            raise ValueError("a symbol without a section")
        defined = index != _UNDEFINED
        symbol = Symbol(
            _text(names, name), info >> 4, info & 15, other & 3, sections.get(index), value, nbytes, defined
        )
        found.append(symbol)
    return found


def _merged(new: Symbol, symbols: dict[str, Symbol]) -> Symbol:
    """The one symbol of a name: a strong definition before weak ones, the first of those before others."""
    old = symbols.setdefault(new.name, new)
    if old is new:
        return new
    visibility = min(filter(None, (old.visibility, new.visibility)), default=0)
    if new.defined and old.defined and GLOBAL == new.binding == old.binding:
        raise CompileError("two definitions", found=new.name)
    if new.defined and (not old.defined or (old.binding, new.binding) == (WEAK, GLOBAL)):
        old.section, old.value, old.nbytes, old.type = new.section, new.value, new.nbytes, new.type
        old.binding, old.defined = new.binding, True
    elif not old.defined and new.binding == GLOBAL:
        old.binding = GLOBAL  # one reference that needs it
    old.visibility = visibility
    return old


def _table(content: bytes, dtype: np.dtype[np.void], offset: int, nbytes: int) -> NDArray[np.void]:
    return np.frombuffer(content, dtype, nbytes // dtype.itemsize, offset)


def _part(content: bytes, head: np.void) -> bytes:
    begin, nbytes = int(head["offset"]), int(head["size"])
    if begin + nbytes > len(content):
        raise ValueError("it ends within a section")
    return content[begin : begin + nbytes]


def _text(names: bytes, at: int) -> str:
    return names[at : names.index(b"\0", at)].decode()
