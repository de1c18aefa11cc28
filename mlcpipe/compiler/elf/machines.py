"""Relocations that compilers emit for libraries of x86-64 and AArch64: what each asks for, how it is written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Asks(Enum):
    """What a relocation's number is computed from."""

    NOTHING = 0
    WORD = 1  # the symbol's address, which only the loader knows
    PLACE = 2  # the symbol's place in the library
    CALL = 3  # the same, or the place of code that jumps into another library
    ENTRY = 4  # the place of the table's entry with the symbol's address
    TLS_MODULE = 5  # the place of two entries with the library's number and 0
    TLS_PLACE = 6  # the place of two entries that find a thread's copy of the symbol
    TLS_OFFSET = 7  # the symbol's place in its thread's copy of the library's data


# Writes a target's address into the image at a place: (image, place, target). Raises ValueError if it does not fit.
Write = Callable[[bytearray, int, int], None]


@dataclass(frozen=True)
class Machine:
    """`jump` makes the code at an address that jumps to the address in a table's entry."""

    page: int
    relocations: Mapping[int, tuple[Asks, Write]]
    word: int  # the relocation that loaders are left with where a word holds a symbol's address; the others likewise
    entry: int
    relative: int
    thread: int  # for the first of a pair of entries: the library's number, and with `thread_is_pair` also the place
    thread_is_pair: bool
    jump: Callable[[int, int], bytes]
    versions: Mapping[str, str]  # symbol of glibc -> its version, where the oldest one is not meant


def _relative32(image: bytearray, place: int, target: int) -> None:
    struct.pack_into("<i", image, place, _signed(target - place, 32))


def _relative64(image: bytearray, place: int, target: int) -> None:
    struct.pack_into("<q", image, place, target - place)


def _word32(image: bytearray, place: int, target: int) -> None:
    struct.pack_into("<i", image, place, _signed(target, 32))


def _word64(image: bytearray, place: int, target: int) -> None:
    struct.pack_into("<Q", image, place, target)


def _nothing(image: bytearray, place: int, target: int) -> None:
    pass


def _signed(value: int, bits: int) -> int:
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError("code and data are too far apart")
    return value


def _instruction(image: bytearray, place: int, bits: int) -> None:
    """Set bits of an instruction of AArch64."""
    (before,) = struct.unpack_from("<I", image, place)
    struct.pack_into("<I", image, place, before | bits)


def _page(image: bytearray, place: int, target: int) -> None:
    pages = _signed((target >> 12) - (place >> 12), 21) & 0x1FFFFF
    _instruction(image, place, (pages & 3) << 29 | pages >> 2 << 5)


def _branch(image: bytearray, place: int, target: int) -> None:
    _instruction(image, place, _signed(target - place >> 2, 26) & 0x3FFFFFF)


def _low(shift: int) -> Write:
    def write(image: bytearray, place: int, target: int) -> None:
        _instruction(image, place, (target & 0xFFF) >> shift << 10)

    return write


def _x86_64_jump(place: int, entry: int) -> bytes:
    return b"\xff\x25" + struct.pack("<i", entry - place - 6) + b"\xcc\xcc"  # jmp *entry(%rip)


def _aarch64_jump(place: int, entry: int) -> bytes:
    code = bytearray(struct.pack("<3I", 0x90000010, 0xF9400211, 0xD61F0220))  # adrp x16; ldr x17, [x16]; br x17
    pages = _signed((entry >> 12) - (place >> 12), 21) & 0x1FFFFF
    _instruction(code, 0, (pages & 3) << 29 | pages >> 2 << 5)
    _low(3)(code, 4, entry)
    return bytes(code)


_X86_64 = Machine(
    page=0x1000,
    relocations={
        0: (Asks.NOTHING, _nothing),
        1: (Asks.WORD, _word64),
        2: (Asks.PLACE, _relative32),  # PC32
        4: (Asks.CALL, _relative32),  # PLT32
        9: (Asks.ENTRY, _relative32),  # GOTPCREL
        19: (Asks.TLS_PLACE, _relative32),  # TLSGD
        20: (Asks.TLS_MODULE, _relative32),  # TLSLD
        21: (Asks.TLS_OFFSET, _word32),  # DTPOFF32
        24: (Asks.PLACE, _relative64),  # PC64
        41: (Asks.ENTRY, _relative32),  # GOTPCRELX
        42: (Asks.ENTRY, _relative32),  # REX_GOTPCRELX
    },
    word=1, entry=6, relative=8, thread=16, thread_is_pair=False, jump=_x86_64_jump,
    # The condition variables of 2002, smaller ones, are the oldest.
    versions={f"pthread_cond_{verb}": "GLIBC_2.3.2" for verb in ("init", "destroy", "signal", "broadcast", "wait",
                                                                 "timedwait")} | {"memcpy": "GLIBC_2.14"},
)  # fmt: skip
_AARCH64 = Machine(
    page=0x10000,  # of the largest pages that kernels have
    relocations={
        0: (Asks.NOTHING, _nothing),
        257: (Asks.WORD, _word64),  # ABS64
        260: (Asks.PLACE, _relative64),
        261: (Asks.PLACE, _relative32),
        275: (Asks.PLACE, _page),  # ADR_PREL_PG_HI21
        277: (Asks.PLACE, _low(0)),  # ADD_ABS_LO12_NC
        278: (Asks.PLACE, _low(0)),  # LDST8_ABS_LO12_NC, and for 16 to 128 bits
        282: (Asks.CALL, _branch),  # JUMP26
        283: (Asks.CALL, _branch),  # CALL26
        284: (Asks.PLACE, _low(1)),
        285: (Asks.PLACE, _low(2)),
        286: (Asks.PLACE, _low(3)),
        299: (Asks.PLACE, _low(4)),
        311: (Asks.ENTRY, _page),  # ADR_GOT_PAGE
        312: (Asks.ENTRY, _low(3)),  # LD64_GOT_LO12_NC
        562: (Asks.TLS_PLACE, _page),  # TLSDESC_ADR_PAGE21
        563: (Asks.TLS_PLACE, _low(3)),  # TLSDESC_LD64_LO12
        564: (Asks.TLS_PLACE, _low(0)),  # TLSDESC_ADD_LO12
        569: (Asks.NOTHING, _nothing),  # TLSDESC_CALL
    },
    word=257, entry=1025, relative=1027, thread=1031, thread_is_pair=True, jump=_aarch64_jump, versions={},
)  # fmt: skip
MACHINES: Mapping[int, Machine] = {62: _X86_64, 183: _AARCH64}  # by e_machine
