"""Apple's object files, Mach-O of 64 bits: their load commands, and copies of static libraries for the simulator."""

from __future__ import annotations

import struct

from mlcpipe.errors import CompileError

# mach-o/loader.h
MACHO_MAGIC = b"\xcf\xfa\xed\xfe"
_HEADER_BYTES = 32
_LC_BUILD_VERSION, _IOS, _IOS_SIMULATOR = 0x32, 2, 7
# ar(5)
_ARCHIVE, _MEMBER = b"!<arch>\n", struct.Struct("16s12s6s6s8s10s2s")


def find_command(content: bytes | bytearray, wanted: int, begin: int = 0) -> int | None:
    """The offset of an object file's first load command of a kind, or None. The file begins at `begin`."""
    (count,) = struct.unpack_from("<I", content, begin + 16)
    at = begin + _HEADER_BYTES
    for _ in range(count):
        kind, nbytes = struct.unpack_from("<2I", content, at)
        if kind == wanted:
            return at
        at += nbytes
    return None


def for_simulator(library: bytes) -> bytes:
    """Relabel a static library for iPhones for their simulator on Apple's processors; the code is the same.

    Raises CompileError for any other file.
    """
    changed = bytearray(library)
    objects = member_offsets(library)
    for begin in objects:
        command = find_command(changed, _LC_BUILD_VERSION, begin)
        if command is None or struct.unpack_from("<I", changed, command + 8) != (_IOS,):
            objects = []
            break
        struct.pack_into("<I", changed, command + 8, _IOS_SIMULATOR)
    if not objects:
        raise CompileError("no static library for iOS", next_step="compile the model again with --target ios")
    return bytes(changed)


def member_offsets(library: bytes) -> list[int]:
    """The offsets of the object files of a static library."""
    at, found = len(_ARCHIVE), []
    while library.startswith(_ARCHIVE) and at + _MEMBER.size <= len(library):
        name, _, _, _, _, nbytes, _ = _MEMBER.unpack_from(library, at)
        at += _MEMBER.size
        long_name = int(name[3:]) if name.startswith(b"#1/") else 0  # of BSD, before the content
        if library[at + long_name : at + long_name + 4] == MACHO_MAGIC:
            found.append(at + long_name)
        at += int(nbytes) + int(nbytes) % 2
    return found
