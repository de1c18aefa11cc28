"""Symbols of relocatable ELF files: which they define for other files, and copies that give them a prefix.

Two models that are linked into one program have functions of the same names; with a prefix they do not meet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import CompileError

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SECTION = struct.Struct("<2I4Q2I2Q")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _UNDEFINED, _LOCAL = 2, 0, 0


@dataclass(frozen=True)
class _Section:
    """A section's type, place and links; `header` is the offset of its header in the file."""

    header: int
    type: int
    offset: int
    nbytes: int
    link: int


def defined_symbols(path: Path) -> set[str]:
    """Names that an object file defines for others. Raises CompileError for anything but an ELF file of 64 bits."""
    content = path.read_bytes()
    return {name for _, name, defined in _global_symbols(content, path) if defined}


def write_renamed(path: Path, output: Path, renamed: Mapping[str, str]) -> None:
    """Write a copy of an object file where symbols that are not local to it have the names in `renamed`."""
    content = bytearray(path.read_bytes())
    strings = _strings(content, path)
    names = bytearray(content[strings.offset : strings.offset + strings.nbytes])
    for at, name, _ in list(_global_symbols(content, path)):
        if name in renamed:
            struct.pack_into("<I", content, at, len(names))
            names += renamed[name].encode() + b"\0"
    # The old table may hold the names of sections too: a longer copy of it takes its place at the file's end.
    struct.pack_into("<2Q", content, strings.header + 24, len(content), len(names))
    output.write_bytes(content + names)


def _global_symbols(content: bytes | bytearray, path: Path) -> Iterator[tuple[int, str, bool]]:
    """Offset of the entry, name, and whether the file defines it, of each symbol that is not local."""
    table, strings = _table(content, path), _strings(content, path)
    for at in range(table.offset, table.offset + table.nbytes, _SYMBOL.size):
        name, info, _, section, _, _ = _SYMBOL.unpack_from(content, at)
        if info >> 4 != _LOCAL:
            begin = strings.offset + name
            yield at, content[begin : content.index(0, begin)].decode(), section != _UNDEFINED


def _table(content: bytes | bytearray, path: Path) -> _Section:
    return next(section for section in _sections(content, path) if section.type == _SYMTAB)


def _strings(content: bytes | bytearray, path: Path) -> _Section:
    return list(_sections(content, path))[_table(content, path).link]


def _sections(content: bytes | bytearray, path: Path) -> Iterator[_Section]:
    if content[: len(_MAGIC)] != _MAGIC:
        raise CompileError("an object file of another format", where=path.name, expected="ELF, 64 bits, little-endian")
    (begin,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<2H", content, 58)
    for header in range(begin, begin + size * count, size):
        _, kind, _, _, offset, nbytes, link, _, _, _ = _SECTION.unpack_from(content, header)
        yield _Section(header, kind, offset, nbytes, link)
