"""Which instructions this machine's CPU runs, asked of the system. One that does not tell has its architecture's base.

Features have Linux's names (`/proc/cpuinfo` on x86, `HWCAP` on ARM). One counts only when the system lets programs use
it: for AVX-512 that is more than the CPU's own word, its registers must be saved at a task switch (XCR0), and AMX's
tiles a process must ask for. Never the name of the CPU: a virtual machine may mask what the name promises.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

Cpuid = Callable[[int, int], tuple[int, int, int, int]]

# What every CPU of an architecture has, and therefore no variant lists.
ARCHITECTURES = {"x86_64": ("x86_64", "amd64", "x64"), "aarch64": ("aarch64", "arm64", "armv8l", "arm64e")}

# Linux's name of a feature -> LLVM's names. Also the instructions that a variant may need: others are never generated.
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
}  # fmt: skip

# Leaf, subleaf, register (eax 0, ebx 1, ecx 2, edx 3), bit: Intel SDM vol. 2A, CPUID; AMD APM vol. 3, appendix E.
_CPUID_BITS = {
    "pni": (1, 0, 2, 0), "pclmulqdq": (1, 0, 2, 1), "ssse3": (1, 0, 2, 9), "fma": (1, 0, 2, 12), "cx16": (1, 0, 2, 13),
    "sse4_1": (1, 0, 2, 19), "sse4_2": (1, 0, 2, 20), "movbe": (1, 0, 2, 22), "popcnt": (1, 0, 2, 23),
    "aes": (1, 0, 2, 25), "xsave": (1, 0, 2, 27), "avx": (1, 0, 2, 28), "f16c": (1, 0, 2, 29),
    "bmi1": (7, 0, 1, 3), "avx2": (7, 0, 1, 5), "bmi2": (7, 0, 1, 8), "avx512f": (7, 0, 1, 16),
    "avx512dq": (7, 0, 1, 17), "avx512ifma": (7, 0, 1, 21), "avx512cd": (7, 0, 1, 28), "avx512bw": (7, 0, 1, 30),
    "avx512vl": (7, 0, 1, 31), "avx512vbmi": (7, 0, 2, 1), "avx512_vbmi2": (7, 0, 2, 6), "gfni": (7, 0, 2, 8),
    "vaes": (7, 0, 2, 9), "vpclmulqdq": (7, 0, 2, 10), "avx512_vnni": (7, 0, 2, 11), "avx512_bitalg": (7, 0, 2, 12),
    "avx512_vpopcntdq": (7, 0, 2, 14), "amx_bf16": (7, 0, 3, 22), "avx512_fp16": (7, 0, 3, 23),
    "amx_tile": (7, 0, 3, 24), "amx_int8": (7, 0, 3, 25), "avx_vnni": (7, 1, 0, 4), "avx512_bf16": (7, 1, 0, 5),
    "lahf_lm": (0x80000001, 0, 2, 0), "abm": (0x80000001, 0, 2, 5),
}  # fmt: skip
_OSXSAVE = (1, 0, 2, 27)
# Bits of XCR0 that the system must have set (Intel SDM vol. 1, 13.1): xmm + ymm, + mask and zmm, + tiles.
_YMM_STATE, _ZMM_STATE, _TILE_STATE = 0x6, 0xE6, 0x60006
# Linux, arch_prctl(2) and Documentation/arch/x86/xstate.rst
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_NEED_YMM = ("avx", "avx2", "avx_vnni", "fma", "f16c", "vaes", "vpclmulqdq")

# asm/hwcap.h of Linux: 0 is AT_HWCAP, 1 is AT_HWCAP2
_HWCAP_BITS = {
    "crc32": (0, 7), "atomics": (0, 8), "asimdhp": (0, 10), "asimdrdm": (0, 12), "asimddp": (0, 20), "sve": (0, 22),
    "sve2": (1, 1), "i8mm": (1, 13), "bf16": (1, 14),
}  # fmt: skip
# Apple: "Determining instruction set characteristics"
_APPLE = {
    "asimddp": "FEAT_DotProd", "asimdhp": "FEAT_FP16", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16",
    "asimdrdm": "FEAT_RDM", "atomics": "FEAT_LSE",
}  # fmt: skip
# winnt.h, PF_ARM_*: an older Windows answers no to a number that it does not know
_WINDOWS_ARM = {"crc32": 31, "atomics": 34, "asimddp": 43, "i8mm": 66, "asimdhp": 67}


def architecture() -> str:
    """`x86_64` or `aarch64`, of this Python and what it loads; another name as the system says it."""
    name = sysconfig.get_platform().rpartition("-")[2] if sys.platform == "win32" else platform.machine()
    return architecture_of(name)


def architecture_of(triple: str) -> str:
    """The architecture that begins an LLVM triple, under one name: `arm64-apple-macos` is `aarch64`."""
    first = triple.partition("-")[0].lower()
    return next((name for name, aliases in ARCHITECTURES.items() if first in aliases), first)


@functools.lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """The features of `LLVM_NAMES` that programs may use on this machine; empty where the system does not tell.

    Where the CPU has AMX this asks Linux for its tiles, for all threads of the process.
    """
    found = frozenset(_asked(architecture())) & frozenset(LLVM_NAMES.get(architecture(), {}))
    return found if "amx_tile" not in found or _tiles_granted() else frozenset(without_tiles(found))


def without_tiles(features: Iterable[str]) -> Iterable[str]:
    """The features that are left to a process that may not use AMX's tiles."""
    return (name for name in features if not name.startswith("amx"))


def _tiles_granted() -> bool:
    """Whether threads of this process may use tiles from now on. Asking twice does no harm; only Linux is asked."""
    if sys.platform != "linux":
        return False
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)
    except (OSError, AttributeError):
        return False


def _asked(arch: str) -> Iterable[str]:
    try:
        if arch == "x86_64" and sys.platform == "linux":
            return from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"))
        if arch == "x86_64" and sys.platform == "win32":
            return from_cpuid(*_cpuid())
        if arch == "aarch64" and sys.platform == "linux":
            getauxval = ctypes.CDLL(None).getauxval
            getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
            return from_hwcap(getauxval(16), getauxval(26))  # AT_HWCAP, AT_HWCAP2
        if arch == "aarch64" and sys.platform == "darwin":
            return [name for name, key in _APPLE.items() if _sysctl(f"hw.optional.arm.{key}") == 1]
        if arch == "aarch64" and sys.platform == "win32":
            present = ctypes.WinDLL("kernel32").IsProcessorFeaturePresent
            return [name for name, number in _WINDOWS_ARM.items() if present(number)]
    except (OSError, AttributeError, ValueError):  # no /proc, no such function, no memory for code: the base will do
        return ()
    return ()


def from_cpuinfo(text: str) -> frozenset[str]:
    """Features of the text of Linux's /proc/cpuinfo on x86: those that all its processors have."""
    lines = (line.partition(":") for line in text.splitlines())
    flags = [frozenset(value.split()) for key, _, value in lines if key.strip() == "flags"]
    return frozenset.intersection(*flags) if flags else frozenset()


def from_hwcap(hwcap: int, hwcap2: int) -> frozenset[str]:
    """Features of the bits that Linux passes to each program on ARM."""
    words = (hwcap, hwcap2)
    return frozenset(name for name, (word, bit) in _HWCAP_BITS.items() if words[word] >> bit & 1)


def from_cpuid(cpuid: Cpuid, xgetbv: Callable[[], int]) -> frozenset[str]:
    """Features by the CPU's own words: `cpuid(leaf, subleaf)` -> eax, ebx, ecx, edx, and XCR0 where it can be read."""
    highest = {0: cpuid(0, 0)[0], 0x80000000: cpuid(0x80000000, 0)[0]}
    subleaves = cpuid(7, 0)[0] if highest[0] >= 7 else 0

    def bit(leaf: int, subleaf: int, register: int, index: int) -> bool:
        there = leaf <= highest[leaf & 0x80000000] and (leaf != 7 or subleaf <= subleaves)
        return bool(there and cpuid(leaf, subleaf)[register] >> index & 1)

    found = {name for name, where in _CPUID_BITS.items() if bit(*where)}
    state = xgetbv() if bit(*_OSXSAVE) else 0

    def saved(name: str) -> bool:
        if name.startswith("avx512"):
            return state & _ZMM_STATE == _ZMM_STATE
        if name.startswith("amx"):
            return state & _TILE_STATE == _TILE_STATE
        return name not in _NEED_YMM or state & _YMM_STATE == _YMM_STATE

    return frozenset(filter(saved, found))


def _sysctl(name: str) -> int:
    """A number of macOS; 0 where it has none of that name."""
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value


# push rbx; leaf to eax, subleaf to ecx, the buffer in r8: arguments come in rcx, rdx, r8 or else in rdi, rsi, rdx
_ARGUMENTS = {"win32": "5389c889d1", "": "534989d089f889f1"}
# cpuid; mov [r8], eax; mov [r8+4], ebx; mov [r8+8], ecx; mov [r8+12], edx; pop rbx; ret
_CPUID = "0fa241890041895804418948084189500c5bc3"
# xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret
_XGETBV = "31c90f01d048c1e2204809d0c3"


def _cpuid() -> tuple[Cpuid, Callable[[], int]]:
    """CPUID and XGETBV as functions: Windows has no call that tells all of it. Raises OSError without such memory."""
    ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(
        _executable(bytes.fromhex(_ARGUMENTS["win32" if sys.platform == "win32" else ""] + _CPUID))
    )
    state = ctypes.CFUNCTYPE(ctypes.c_uint64)(_executable(bytes.fromhex(_XGETBV)))

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        registers = (ctypes.c_uint32 * 4)()
        ask(leaf, subleaf, ctypes.addressof(registers))
        a, b, c, d = registers
        return a, b, c, d

    return cpuid, lambda: int(state())


def _executable(code: bytes) -> int:
    """The address of a page that holds `code`, for the life of the process. Raises OSError."""
    if sys.platform == "win32":
        allocate = ctypes.WinDLL("kernel32", use_last_error=True).VirtualAlloc
        allocate.restype = ctypes.c_void_p
        allocate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint32]
        address = allocate(None, mmap.PAGESIZE, 0x3000, 0x40)  # MEM_COMMIT | MEM_RESERVE, PAGE_EXECUTE_READWRITE
        if not address:
            raise OSError(ctypes.get_last_error(), "VirtualAlloc")
        ctypes.memmove(address, code, len(code))
        return int(address)
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    view = (ctypes.c_char * len(code)).from_buffer(page)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(view))  # the page stays mapped
    return ctypes.addressof(view)
