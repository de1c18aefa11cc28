"""Facts about this computer and the installed packages."""

from __future__ import annotations

import contextlib
import platform
import sys
from importlib import metadata
from pathlib import Path

from mlcpipe.cpu_features import host_features
from mlcpipe.cpu_name import first_of
from mlcpipe.version import PINNED, __version__

# of those in mlcpipe.cpu_features
_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimdhp", "asimddp", "i8mm", "bf16", "sve",
    "sve2",
)  # fmt: skip


def package_version(name: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """What decides about results: mlcpipe, Python, TVM and numpy."""
    return {
        "mlcpipe": __version__,
        "python": platform.python_version(),
        **{name: package_version(name) for name in PINNED},
        "numpy": package_version("numpy"),
    }


def cpu_features() -> list[str]:
    """Those instruction sets of this processor that kernels care about; [] where the system does not tell."""
    present = host_features()
    return [name for name in _FEATURES if name in present]


def system_name() -> str:
    """Operating system, release and architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"


def core_counts() -> tuple[int, int]:
    """Physical cores, and logical processors that this process may use."""
    import psutil

    logical = _usable_processors()
    return min(psutil.cpu_count(logical=False) or logical, logical), logical


def reset_peak_memory() -> None:
    """Let `peak_memory_bytes` count from now on; without effect where the system has no such thing (not Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): VmHWM


def peak_memory_bytes() -> int:
    """The most physical memory this process has had, mapped files included."""
    if high := first_of("/proc/self/status").get("VmHWM"):
        return int(high.split()[0]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): kilobytes on Linux, bytes on macOS


def private_memory_bytes() -> int | None:
    """Physical memory of this process without mapped files (code, weights): proc(5) RssAnon + RssShmem.

    None where the system does not tell them apart.
    """
    status = first_of("/proc/self/status")
    parts = [status.get(name) for name in ("RssAnon", "RssShmem")]
    return sum(int(part.split()[0]) * 1024 for part in parts if part) if all(parts) else None


def _usable_processors() -> int:
    import psutil

    try:
        return len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS has no affinity
        return psutil.cpu_count() or 1
