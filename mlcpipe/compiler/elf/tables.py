"""The tables of a shared library: names, their hashes, and versions of glibc's symbols."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

C_LIBRARY = "libc.so.6"
_OURS, _FIRST_VERSION = 1, 2  # versions' numbers: none, and the first that has a name


def string_table(names: Iterable[str]) -> tuple[bytes, dict[str, int]]:
    """Names, each once, ended by zeros -> the table, and where each is."""
    table, place_of = bytearray(1), {"": 0}
    for name in names:
        if name not in place_of:
            place_of[name] = len(table)
            table += name.encode() + b"\0"
    return bytes(table), place_of


def name_hash(name: str) -> int:
    """ELF's hash of a name, 28 bits."""
    found = 0
    for byte in name.encode():
        found = (found << 4) + byte
        found = (found ^ (found & 0xF0000000) >> 24) & 0x0FFFFFFF
    return found


def hash_table(names: Sequence[str]) -> bytes:
    """DT_HASH for symbols 1 to n with these names: buckets of chains."""
    count = max(1, len(names) // 2)
    buckets, chain = [0] * count, [0] * (len(names) + 1)
    for number, name in enumerate(names, 1):
        bucket = name_hash(name) % count
        chain[number], buckets[bucket] = buckets[bucket], number
    return struct.pack(f"<{2 + count + len(chain)}I", count, len(chain), *buckets, *chain)


def version_tables(
    used: Sequence[str | None], versions: Mapping[str, str], place_of: Mapping[str, int]
) -> tuple[bytes, bytes]:
    """DT_VERSYM and DT_VERNEED: the version of each symbol after the first, None for those defined here.

    `versions` are those of the C library's symbols; another one is bound to the oldest that is found.
    """
    wanted = {name: versions[name] for name in used if name is not None and name in versions}
    number_of = {version: number for number, version in enumerate(sorted(set(wanted.values())), _FIRST_VERSION)}
    numbers = [0, *(number_of[wanted[name]] if name is not None and name in wanted else _OURS for name in used)]
    needs = b""
    if number_of:
        needs = struct.pack("<HHIII", 1, len(number_of), place_of[C_LIBRARY], 16, 0)
        for version, number in number_of.items():
            following = 16 if number - _FIRST_VERSION < len(number_of) - 1 else 0
            needs += struct.pack("<IHHII", name_hash(version), 0, number, place_of[version], following)
    return struct.pack(f"<{len(numbers)}H", *numbers), needs
