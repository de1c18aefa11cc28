"""Instruction sets of this machine's CPU, reported by Linux or macOS. Other systems, including Windows (never tested),
get only the architecture's base.

Features have Linux's names (`/proc/cpuinfo` on x86, `HWCAP` on ARM and RISC-V). A feature counts only if programs may
use it: the system must save AVX-512's registers at a task switch (XCR0), and a process must request AMX's tiles. The
CPU's name is never used, because a virtual machine may mask features.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# Our name of an architecture -> other names for it.
ARCHITECTURES = {
    "x86_64": ("x86_64", "amd64", "x64"),
    "aarch64": ("aarch64", "arm64", "armv8l", "arm64e"),
    "riscv64": ("riscv64",),
}

# LLVM's generic CPU of an architecture, and its base features; for riscv64 those that distributions require.
BASE: dict[str, tuple[str, tuple[str, ...]]] = {
    "x86_64": ("x86-64", ()),
    "aarch64": ("generic", ()),
    "riscv64": ("generic-rv64", ("+m", "+a", "+f", "+d", "+c")),
}

# Linux's name of a feature -> LLVM's names. Variants may use only these instruction sets.
LLVM_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "pni": ("sse3",), "ssse3": ("ssse3",), "sse4_1": ("sse4.1",), "sse4_2": ("sse4.2", "crc32"),
        "popcnt": ("popcnt",), "cx16": ("cx16",), "lahf_lm": ("sahf",), "abm": ("lzcnt",), "movbe": ("movbe",),
        "xsave": ("xsave",), "bmi1": ("bmi",), "bmi2": ("bmi2",), "f16c": ("f16c",), "fma": ("fma",), "avx": ("avx",),
        "avx2": ("avx2",), "avx_vnni": ("avxvnni",), "avx512f": ("avx512f",), "avx512bw": ("avx512bw",),
        "avx512cd": ("avx512cd",), "avx512dq": ("avx512dq",), "avx512vl": ("avx512vl",),
        "avx512_vnni": ("avx512vnni",), "avx512_bf16": ("avx512bf16",), "avx512_fp16": ("avx512fp16",),
        "avx512ifma": ("avx512ifma",), "avx512vbmi": ("avx512vbmi",), "avx512_vbmi2": ("avx512vbmi2",),
        "avx512_bitalg": ("avx512bitalg",), "avx512_vpopcntdq": ("avx512vpopcntdq",), "gfni": ("gfni",),
        "aes": ("aes",), "vaes": ("vaes",), "pclmulqdq": ("pclmul",), "vpclmulqdq": ("vpclmulqdq",),
        "amx_tile": ("amx-tile",), "amx_int8": ("amx-int8",), "amx_bf16": ("amx-bf16",),
    },
    "aarch64": {
        "asimddp": ("dotprod",), "asimdhp": ("fullfp16",), "asimdrdm": ("rdm",), "atomics": ("lse",),
        "crc32": ("crc",), "i8mm": ("i8mm",), "bf16": ("bf16",), "sve": ("sve",), "sve2": ("sve2",),
    },
    "riscv64": {
        "v": ("v", "zve32f", "zve32x", "zve64d", "zve64f", "zve64x", "zvl32b", "zvl64b", "zvl128b"),
    },
}  # fmt: skip

# Linux, arch_prctl(2) and Documentation/arch/x86/xstate.rst
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
# asm/hwcap.h of Linux: 0 is AT_HWCAP, 1 is AT_HWCAP2
_HWCAP_BITS = {
    "aarch64": {
        "crc32": (0, 7), "atomics": (0, 8), "asimdhp": (0, 10), "asimdrdm": (0, 12), "asimddp": (0, 20), "sve": (0, 22),
        "sve2": (1, 1), "i8mm": (1, 13), "bf16": (1, 14),
    },
    "riscv64": {"v": (0, 21)},  # a bit for each letter
}  # fmt: skip
# Apple: "Determining instruction set characteristics"
_APPLE = {
    "asimddp": "FEAT_DotProd", "asimdhp": "FEAT_FP16", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16",
    "asimdrdm": "FEAT_RDM", "atomics": "FEAT_LSE",
}  # fmt: skip


def architecture() -> str:
    """Architecture of this Python process: `x86_64`, `aarch64`, or the system's name for another."""
    name = sysconfig.get_platform().rpartition("-")[2] if sys.platform == "win32" else platform.machine()
    return architecture_of(name)


def architecture_of(triple: str) -> str:
    """The normalized architecture of an LLVM triple: `arm64-apple-macos` is `aarch64`."""
    first = triple.partition("-")[0].lower()
    return next((name for name, aliases in ARCHITECTURES.items() if first in aliases), first)


@functools.lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """The features of `LLVM_NAMES` that programs may use on this machine; empty if the system does not report any.

    On a CPU with AMX this requests its tiles from Linux, for all threads of the process.
    """
    features = frozenset(_reported(architecture())) & frozenset(LLVM_NAMES.get(architecture(), {}))
    if "amx_tile" in features and not _tiles_granted():
        return frozenset(name for name in features if not name.startswith("amx"))
    return features


def _tiles_granted() -> bool:
    """Request AMX tiles for all threads of this process -> whether Linux grants them. Repeating is harmless."""
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)
    except (OSError, AttributeError):
        return False


def _reported(arch: str) -> Iterable[str]:
    try:
        if arch == "x86_64" and sys.platform == "linux":
            return from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        if arch in _HWCAP_BITS and sys.platform == "linux":
            getauxval = ctypes.CDLL(None).getauxval
            getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
            return from_hwcap(arch, getauxval(16), getauxval(26))  # AT_HWCAP, AT_HWCAP2
        if arch == "aarch64" and sys.platform == "darwin":
            return [name for name, key in _APPLE.items() if _sysctl(f"hw.optional.arm.{key}") == 1]
    except (OSError, AttributeError):  # no /proc, no such function: use the base
        return ()
    return ()


def from_cpuinfo(text: str) -> frozenset[str]:
    """Features common to all processors in the text of Linux's /proc/cpuinfo."""
    lines = (line.partition(":") for line in text.splitlines())
    flags = [frozenset(value.split()) for key, _, value in lines if key.strip() in ("flags", "Features")]
    return frozenset.intersection(*flags) if flags else frozenset()


def from_hwcap(arch: str, hwcap: int, hwcap2: int) -> frozenset[str]:
    """Features from the HWCAP bits that Linux passes to each program on ARM and RISC-V."""
    words = (hwcap, hwcap2)
    return frozenset(name for name, (word, bit) in _HWCAP_BITS[arch].items() if words[word] >> bit & 1)


def _sysctl(name: str) -> int:
    """The value of an integer sysctl of macOS; 0 if it does not exist."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
