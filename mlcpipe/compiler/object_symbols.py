"""Symbols of relocatable ELF and Mach-O files: lists the exported ones, and writes copies with a prefix.

Two models linked into one program have functions of the same names; a prefix keeps them apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.compiler.macho import MACHO_MAGIC, find_command
from mlcpipe.errors import CompileError

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SECTION = struct.Struct("<2I4Q2I2Q")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _UNDEFINED, _LOCAL = 2, 0, 0
# mach-o/loader.h, mach-o/nlist.h
_LC_SYMTAB = 2
_NLIST = struct.Struct("<IBBHQ")
_STAB, _TYPE, _EXTERNAL = 0xE0, 0x0E, 0x01
_MACHINE, _RISCV = 18, (243).to_bytes(2, "little")  # e_machine of ELF's header: EM_RISCV


@dataclass(frozen=True)
class _Names:
    """The table of names: its place in the file, and the fields that point there."""

    offset: int
    nbytes: int
    header: int
    place: struct.Struct


@dataclass(frozen=True)
class _Symbol:
    """A symbol that is not local to its file; `entry` is where the file has the offset of its name."""

    entry: int
    name: str
    defined: bool


def defined_symbols(path: Path) -> set[str]:
    """Names that an object file exports. Raises CompileError for anything but ELF and Mach-O of 64 bits."""
    content = path.read_bytes()
    return {symbol.name for symbol in _symbols(content, path)[1] if symbol.defined}


def is_riscv(path: Path) -> bool:
    """Whether an object file is ELF with code for RISC-V."""
    header = path.read_bytes()[: _MACHINE + 2]
    return header.startswith(_MAGIC) and header.endswith(_RISCV)


def write_renamed(path: Path, output: Path, renamed: Mapping[str, str]) -> None:
    """Write a copy of an object file whose non-local symbols have the names in `renamed`."""
    content = bytearray(path.read_bytes())
    table, symbols = _symbols(content, path)
    lead = _lead(content)
    names = bytearray(content[table.offset : table.offset + table.nbytes])
    for symbol in symbols:
        if symbol.name in renamed:
            struct.pack_into("<I", content, symbol.entry, len(names))
            names += (lead + renamed[symbol.name]).encode() + b"\0"
    # The old table may hold section names too, so a longer copy at the file's end replaces it.
    content += bytes(-len(content) % 8)
    table.place.pack_into(content, table.header, len(content), len(names))
    output.write_bytes(content + names)


def _lead(content: bytes | bytearray) -> str:
    """The prefix of a symbol before its name in C."""
    return "_" if content[:4] == MACHO_MAGIC else ""


def _symbols(content: bytes | bytearray, path: Path) -> tuple[_Names, list[_Symbol]]:
    """The table of names, and each symbol that is not local."""
    table, found = _macho(content, path) if _lead(content) else _elf(content, path)
    symbols = []
    for entry, name, defined in found:
        begin = table.offset + name
        text = content[begin : content.index(0, begin)].decode()
        symbols.append(_Symbol(entry, text.removeprefix(_lead(content)), defined))
    return table, symbols


def _macho(content: bytes | bytearray, path: Path) -> tuple[_Names, list[tuple[int, int, bool]]]:
    command = find_command(content, _LC_SYMTAB)
    if command is None:
        raise CompileError("an object file without symbols", where=path.name)
    begin, count, offset, nbytes = struct.unpack_from("<4I", content, command + 8)
    symbols = []
    for at in range(begin, begin + count * _NLIST.size, _NLIST.size):
        name, kind, _, _, _ = _NLIST.unpack_from(content, at)
        if kind & _EXTERNAL and not kind & _STAB:
            symbols.append((at, name, kind & _TYPE != _UNDEFINED))
    return _Names(offset, nbytes, command + 16, struct.Struct("<2I")), symbols


def _elf(content: bytes | bytearray, path: Path) -> tuple[_Names, list[tuple[int, int, bool]]]:
    sections = list(_sections(content, path))
    _, _, offset, nbytes, link = next(section for section in sections if section[1] == _SYMTAB)
    header, _, names_offset, names_nbytes, _ = sections[link]
    symbols = []
    for at in range(offset, offset + nbytes, _SYMBOL.size):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(content, at)
        if info >> 4 != _LOCAL:
            symbols.append((at, name, section != _UNDEFINED))
    return _Names(names_offset, names_nbytes, header + 24, struct.Struct("<2Q")), symbols


def _sections(content: bytes | bytearray, path: Path) -> Iterator[tuple[int, int, int, int, int]]:
    """Of each section of an ELF file: the offset of its header, its type, offset, size and link."""
    if content[: len(_MAGIC)] != _MAGIC:
        raise CompileError(
            "an object file of another format", where=path.name, expected="ELF or Mach-O, 64 bits, little-endian"
        )
    (begin,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<2H", content, 58)
    for header in range(begin, begin + size * count, size):
        _, kind, _, _, offset, nbytes, link, _, _, _ = _SECTION.unpack_from(content, header)
        yield header, kind, offset, nbytes, link
