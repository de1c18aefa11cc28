"""Writes sections of object files as a shared library for Linux and glibc."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from mlcpipe.compiler.elf.machines import MACHINES, Asks
from mlcpipe.compiler.elf.objects import (
    EXECUTE,
    FINI_ARRAY,
    INIT_ARRAY,
    NOBITS,
    RELOCATION,
    SYMBOL,
    THREAD_SYMBOL,
    TLS,
    WRITE,
    Section,
    Symbol,
    read_objects,
)  # fmt: skip
from mlcpipe.compiler.elf.tables import C_LIBRARY, hash_table, string_table, version_tables
from mlcpipe.errors import CompileError

_NEEDED = ("libm.so.6", C_LIBRARY)
_HEADER, _SEGMENT, _SEGMENTS = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQQQ"), 8
_LOAD, _DYNAMIC, _TLS, _FRAMES, _STACK, _RELRO = 1, 2, 7, 0x6474E550, 0x6474E551, 0x6474E552
_R, _RW, _RX = 4, 6, 5
_ARRAYS = (INIT_ARRAY, FINI_ARRAY)
_BIND_NOW = 8
_SHARED, _DEFINED = 3, 1  # a library; the section of its symbols, any but the reserved ones: it has no section headers


def link(objects: Iterable[Path], output: Path) -> None:
    """Link object files into the shared library `output`. Raises CompileError.

    Names that the objects define are bound inside, others when it is loaded.
    """
    machine, sections, symbols = read_objects(objects)
    if machine not in MACHINES:
        raise CompileError("object files", expected="x86-64 or AArch64", found=f"machine {machine}")
    try:
        image = _Library(machine, sections, symbols).image()
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise CompileError("object files that do not fit together", found=error) from error
    output.write_bytes(image)


class _Library:
    """An address is also the place in the file."""

    def __init__(self, number: int, sections: list[Section], symbols: list[Symbol]) -> None:
        self.number, self.machine, self.sections = number, MACHINES[number], sections
        self.entries: dict[tuple[Asks, Symbol | None], int] = {}  # -> its place in the table of addresses
        self.table_bytes = 0
        self.jumps: dict[Symbol, int] = {}  # of other libraries -> the place of the code that jumps there
        self.left: list[tuple[int, int, int, int]] = []  # relocations for the loader
        words = sum(
            self._prepare(section, kind, symbol) for section in sections for _, kind, symbol, _ in section.relocations
        )
        self.left_bytes = RELOCATION.itemsize * (words + len(self.entries))
        used = {symbol: None for section in sections for _, _, symbol, _ in section.relocations if not symbol.defined}
        self.named = [one for one in symbols if one.exported] + [symbol for symbol in used if symbol.name]
        self.number_of = {symbol: number for number, symbol in enumerate(self.named, 1)}
        self.jump_bytes = len(self.machine.jump(0, 0))
        self.file = bytearray(_HEADER.size + _SEGMENTS * _SEGMENT.size)
        self.segments: list[tuple[int, ...]] = []
        self.dynamic: list[tuple[int, int]] = []

    def image(self) -> bytes:
        """The file."""
        self._lay_out_tables()
        self._lay_out_constants()
        begin = self._page()
        self._place(lambda one: bool(one.flags & EXECUTE))
        for symbol in self.jumps:
            self.jumps[symbol] = self._append(bytes(self.jump_bytes), 8)
        self._load(begin, _RX)
        self._lay_out_data()
        for section in self.sections:
            for offset, kind, symbol, addend in section.relocations:
                self._relocate(section.address + offset, kind, symbol, addend)
        self._fill_tables()
        self._put(0, self._headers())
        return bytes(self.file)

    def _prepare(self, section: Section, kind: int, symbol: Symbol) -> bool:
        """Note what a relocation needs in tables -> whether it is left to the loader."""
        if kind not in self.machine.relocations:
            raise CompileError("no such relocation", where=section.name, found=f"number {kind}")
        asks, _ = self.machine.relocations[kind]
        if asks is Asks.PLACE and not symbol.defined:
            raise CompileError("a name that no object defines", where=section.name, found=symbol.name)
        if asks is Asks.CALL and not symbol.defined:
            self.jumps[symbol] = 0
            asks = Asks.ENTRY
        key = (asks, None if asks is Asks.TLS_MODULE else symbol)
        if asks in (Asks.ENTRY, Asks.TLS_PLACE, Asks.TLS_MODULE) and key not in self.entries:
            self.entries[key] = self.table_bytes
            self.table_bytes += 8 if asks is Asks.ENTRY else 16
        if asks is Asks.WORD and not section.flags & WRITE:
            raise CompileError("an address among constants", where=section.name, next_step="compile with -fPIC")
        return asks is Asks.WORD

    # ---- layout

    def _lay_out_tables(self) -> None:
        names, versions = [one.name for one in self.named], self.machine.versions
        strings, self.name_at = string_table([*names, *_NEEDED, *versions.values()])
        symbols, needs = version_tables(
            [None if one.defined else one.name for one in self.named], versions, self.name_at
        )
        self.symbols_at = self._append(bytes(SYMBOL.itemsize * (1 + len(names))), 8)
        self.left_at = self._append(bytes(self.left_bytes), 8)
        self.dynamic = [(1, self.name_at[name]) for name in _NEEDED] + [
            (4, self._append(hash_table(names), 8)), (5, self._append(strings, 1)), (10, len(strings)),
            (6, self.symbols_at), (11, SYMBOL.itemsize),
            (7, self.left_at), (8, self.left_bytes), (9, RELOCATION.itemsize),
            (30, _BIND_NOW),
        ]  # fmt: skip
        if needs:  # loaders expect both or neither
            self.dynamic += [
                (0x6FFFFFF0, self._append(symbols, 2)),
                (0x6FFFFFFE, self._append(needs, 8)),
                (0x6FFFFFFF, 1),
            ]

    def _lay_out_constants(self) -> None:
        self._place(lambda one: not one.flags & (WRITE | EXECUTE) and not one.is_frames)
        if found := self._place(lambda one: one.is_frames)[0]:
            self.file += bytes(4)  # their end
            # A header without a table, so that they are read in turn: their place is a signed distance of 32 bits.
            at = self._append(bytes((1, 0x1B, 0xFF, 0xFF)), 4)
            self.file += struct.pack("<i", found - (at + 4))
            self.segments.append((_FRAMES, _R, at, 8, 8, 4))
        self._load(0, _R)

    def _lay_out_data(self) -> None:
        begin = self._page()
        self._place_thread_data()
        self.sections.sort(key=lambda one: one.priority if one.type in _ARRAYS else 0)
        for tag, kind in zip((25, 26), _ARRAYS, strict=True):
            at, nbytes = self._place(lambda one: one.type == kind)  # noqa: B023 - it is called here
            self.dynamic += [(tag, at), (tag + 2, nbytes)] if nbytes else []
        self._place(lambda one: one.is_data and one.is_constant)
        nbytes = 16 * (len(self.dynamic) + 1)
        self.dynamic_at = self._append(bytes(nbytes), 8)
        self.table_at = self._append(bytes(self.table_bytes), 16)
        constant = self._page() - begin
        self._place(lambda one: one.is_data and not one.is_constant and one.type != NOBITS)
        end = self._zeros(len(self.file), lambda one: one.is_data and not one.is_constant)
        self._load(begin, _RW, end - begin)
        self.segments += [
            (_DYNAMIC, _RW, self.dynamic_at, nbytes, nbytes, 8),
            (_RELRO, _R, begin, constant, constant, 1),
            (_STACK, _RW, 0, 0, 0, 16),
        ]

    def _place_thread_data(self) -> None:
        """What each thread gets a copy of: numbers, then zeros, which take no place in the file."""
        own = [one for one in self.sections if one.flags & TLS]
        align = max((one.align for one in own), default=1)
        self.thread_at = self._append(b"", align)
        self._place(lambda one: one in own and one.type != NOBITS)
        nbytes = len(self.file) - self.thread_at
        end = self._zeros(len(self.file), lambda one: one in own)
        if own:
            self.segments.append((_TLS, _R, self.thread_at, nbytes, end - self.thread_at, align))

    def _append(self, content: bytes, align: int) -> int:
        self.file += bytes(-len(self.file) % align)
        self.file += content
        return len(self.file) - len(content)

    def _page(self) -> int:
        return self._append(b"", self.machine.page)

    def _place(self, chosen: Callable[[Section], object]) -> tuple[int, int]:
        """Append the chosen sections -> their begin and bytes, zeros if there are none."""
        places = []
        for section in filter(chosen, self.sections):
            section.address = self._append(section.content, section.align)
            places.append(section.address)
        return (places[0], len(self.file) - places[0]) if places else (0, 0)

    def _zeros(self, end: int, chosen: Callable[[Section], object]) -> int:
        """Give the chosen sections of zeros addresses behind `end` -> their end."""
        for section in self.sections:
            if section.type == NOBITS and chosen(section):
                section.address = -(-end // section.align) * section.align
                end = section.address + section.nbytes
        return end

    def _load(self, begin: int, flags: int, memory: int = 0) -> None:
        nbytes = len(self.file) - begin
        self.segments.append((_LOAD, flags, begin, nbytes, max(nbytes, memory), self.machine.page))

    # ---- contents

    def _relocate(self, place: int, kind: int, symbol: Symbol, addend: int) -> None:
        asks, write = self.machine.relocations[kind]
        if asks is Asks.WORD:
            self._leave(place, self.machine.word, symbol, addend)
            return
        target = 0 if asks is Asks.NOTHING else symbol.address
        if asks is Asks.CALL and not symbol.defined:
            target = self.jumps[symbol]
        elif asks is Asks.TLS_OFFSET:
            target -= self.thread_at
        elif (key := (asks, None if asks is Asks.TLS_MODULE else symbol)) in self.entries:
            target = self.table_at + self.entries[key]
        write(self.file, place, target + addend)

    def _leave(self, place: int, kind: int, symbol: Symbol, addend: int = 0) -> None:
        """A relocation for the loader: relative to where it loads the library, if the symbol is in it."""
        if symbol.section is not None:
            self.left.append((place, self.machine.relative, 0, symbol.address + addend))
        else:
            self.left.append((place, kind, self.number_of[symbol], addend))

    def _fill_tables(self) -> None:
        for (asks, symbol), offset in self.entries.items():
            place = self.table_at + offset
            if asks is Asks.ENTRY and symbol is not None:
                self._leave(place, self.machine.entry, symbol)
                continue
            inside = 0 if symbol is None else symbol.address - self.thread_at
            self.left.append((place, self.machine.thread, 0, inside if self.machine.thread_is_pair else 0))
            if not self.machine.thread_is_pair:
                self._put(place + 8, struct.pack("<Q", inside))
        for symbol, at in self.jumps.items():
            self._put(at, self.machine.jump(at, self.table_at + self.entries[Asks.ENTRY, symbol]))
        self._put(self.left_at, np.array(self.left, RELOCATION).tobytes())
        self._put(self.symbols_at, np.array([(0,) * 6, *self._symbol_records()], SYMBOL).tobytes())
        pairs = [*self.dynamic, (0, 0)]
        self._put(self.dynamic_at, struct.pack(f"<{2 * len(pairs)}Q", *(number for pair in pairs for number in pair)))

    def _symbol_records(self) -> Iterator[tuple[int, ...]]:
        for one in self.named:
            value = one.address - (self.thread_at if one.type == THREAD_SYMBOL else 0) if one.defined else 0
            section = _DEFINED if one.defined else 0
            yield self.name_at[one.name], one.binding << 4 | one.type, 0, section, value, one.nbytes

    def _put(self, at: int, content: bytes) -> None:
        self.file[at : at + len(content)] = content

    def _headers(self) -> bytes:
        identity = b"\x7fELF\x02\x01\x01" + bytes(9)
        header = _HEADER.pack(identity, _SHARED, self.number, 1, 0, _HEADER.size, 0, 0, _HEADER.size, _SEGMENT.size,
                              len(self.segments), 0, 0, 0)  # fmt: skip
        return header + b"".join(
            _SEGMENT.pack(kind, flags, at, at, at, in_file, in_memory, align)
            for kind, flags, at, in_file, in_memory, align in self.segments
        )
