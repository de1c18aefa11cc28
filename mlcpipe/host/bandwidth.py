"""Measures this machine's memory read bandwidth, the upper bound of decode speed.

A decode step reads every weight once, so tokens per second x bytes of weights cannot exceed the bandwidth.
The faster of two readers counts: numpy's xor over uint64 and the C library's memchr. Both release the GIL, and each
thread reads its part several times in a row, so that Python's threads do not wait for each other between the rounds.
On an EPYC 9005 guest with 2 cores, 2026-11, a C program with AVX-512 loads read 41 GB/s with one thread and 45
with two; memchr read 39 and 46, numpy 35 and 44.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.memory import free_memory
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.private import private_folder

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    import numpy.typing as npt

    Uint64s = npt.NDArray[np.uint64]

_MIB = 1 << 20
_MIN_BYTES = 64 * _MIB
_DEFAULT_BYTES = 512 * _MIB
_ROUNDS, _TRIES = 3, 3


def read_bandwidth_gb_s(threads: int, *, nbytes: int | None = None) -> float:
    """The sustained read bandwidth of main memory with `threads` threads, in GB/s (10^9 bytes).

    Reads a buffer of `nbytes` (by default well above the last cache, at most a quarter of the free memory) three times
    with each reader, up to three times in a row after a part as warm-up, and returns the better median; takes a second.
    Raises UsageError if `threads` < 1 and ResourceError if memory is too small for a useful buffer.
    """
    import numpy as np

    if threads < 1:
        raise UsageError("cannot measure bandwidth", expected="at least 1 thread", found=threads)
    size = nbytes if nbytes is not None else _buffer_bytes()
    buffer = np.full(size // 8, 1, dtype=np.uint64)
    parts = np.array_split(buffer, threads)
    readers = [_xor_reader(), *_memchr_readers()]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        return max(_gb_s(pool, reader, parts, buffer.nbytes) for reader in readers)


def cached_read_bandwidth_gb_s(threads: int, cache_dir: Path, *, seen_gb_s: float = 0.0) -> float:
    """`read_bandwidth_gb_s`, measured once per boot and number of threads and cached in `cache_dir`.

    `seen_gb_s` is a bandwidth already reached: a cached value below it was measured on a busy machine, so we
    measure again and keep the larger value.
    """
    path = cache_dir / "bandwidth.json"
    boot = _boot_identity()
    known = _read_cache(path, boot)
    value = known.get(str(threads), 0.0)
    if value > seen_gb_s:
        return value
    known[str(threads)] = max(value, read_bandwidth_gb_s(threads))
    _write_cache(path, {"boot": boot, "read_gb_s": known})
    return known[str(threads)]


def last_cache_bytes() -> int:
    """Total size of the machine's last-level caches in bytes; 0 if unknown."""
    total = 0
    seen: set[str] = set()
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index3"):
        try:
            shared = (index / "shared_cpu_list").read_text().strip()
            size = (index / "size").read_text().strip()
        except OSError:
            continue
        if shared not in seen and size.endswith("K"):
            seen.add(shared)
            total += int(size[:-1]) * 1024
    return total


def _buffer_bytes() -> int:
    free = free_memory()
    size = min(max(_DEFAULT_BYTES, 4 * last_cache_bytes()), free.nbytes // 4)
    if size < _MIN_BYTES:
        raise ResourceError(
            "not enough free memory to measure the read bandwidth",
            expected=f"{4 * _MIN_BYTES // _MIB} MiB free",
            found=free,
        )
    return size // 4096 * 4096


def _gb_s(pool: ThreadPoolExecutor, reader: Callable[[Uint64s], None], parts: list[Uint64s], nbytes: int) -> float:
    import statistics
    from threading import Barrier

    together = Barrier(len(parts), timeout=60)  # a thread that cannot start must not hold up the others
    # One read of a server's buffer, four times a cache of hundreds of MiB, takes as long as several of a laptop's.
    rounds = min(max(_ROUNDS * _DEFAULT_BYTES // nbytes, 1), _ROUNDS)

    def read(part: Uint64s) -> tuple[float, float]:
        reader(part[: part.size // 8])
        together.wait()
        began = time.perf_counter()
        for _ in range(rounds):
            reader(part)
        return began, time.perf_counter()

    speeds: list[float] = []
    for _ in range(_TRIES):
        began, ended = zip(*pool.map(read, parts), strict=True)
        speeds.append(float(rounds * nbytes / (max(ended) - min(began)) / 1e9))
    return statistics.median(speeds)


def _xor_reader() -> Callable[[Uint64s], None]:
    import numpy as np

    def read(part: Uint64s) -> None:
        np.bitwise_xor.reduce(part)

    return read


def _memchr_readers() -> list[Callable[[Uint64s], None]]:
    """A reader that searches for an absent byte, or none if the C library cannot be loaded."""
    try:
        library = ctypes.CDLL("ucrtbase") if sys.platform == "win32" else ctypes.CDLL(None)
        memchr = library.memchr
    except (OSError, AttributeError):
        return []
    memchr.restype = ctypes.c_void_p
    memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def read(part: Uint64s) -> None:
        memchr(part.ctypes.data, 0xFF, part.nbytes)

    return [read]


def _boot_identity() -> str:
    """Identifies this boot: memory or the virtual machine's host may change at a reboot."""
    linux = Path("/proc/sys/kernel/random/boot_id")
    try:
        return linux.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        import psutil

        # clock corrections shift the boot time by about a second
        return str(round(psutil.boot_time() / 60))


def _read_cache(path: Path, boot: str) -> dict[str, float]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("boot") != boot:
        return {}
    values = content.get("read_gb_s")
    if not isinstance(values, dict):
        return {}
    return {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and v > 0}


def _write_cache(path: Path, content: dict[str, object]) -> None:
    """Store the result; an unwritable cache only costs a second at the next start."""
    with contextlib.suppress(OSError, ResourceError):
        private_folder(path.parent)
        atomic_write(path, json.dumps(content).encode())
