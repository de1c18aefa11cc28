"""The memory of this process, and how much more it can get."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.host.cgroups import cgroup_folders
from mlcpipe.host.finding import byte_size
from mlcpipe.host.proc import first_values, system_text

# Version 2's names, then version 1's; "max" is no limit.
_CGROUP_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_CGROUP_USES = ("memory.current", "memory.usage_in_bytes")
# getrlimit(2) -> the usage in proc(5)'s status, and the shell's name of the limit.
_LIMITS = {"RLIMIT_AS": ("VmSize", "ulimit -v"), "RLIMIT_DATA": ("VmData", "ulimit -d")}


@dataclass(frozen=True, order=True)
class FreeMemory:
    """Available bytes, and the limiting cgroup or resource limit; "" for the machine or device itself."""

    nbytes: int
    limit: str = ""

    def __str__(self) -> str:
        return f"{byte_size(self.nbytes)} free" + (f" within {self.limit}" if self.limit else "")


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """The least of the machine's free memory and the remainders of this process's cgroups and resource limits.

    `root` is the folder that has proc and sys.
    """
    import psutil

    machine = FreeMemory(int(psutil.virtual_memory().available))
    return min([machine, *_left_by_cgroups(root), *_left_by_limits()])


def _left_by_cgroups(root: Path) -> Iterator[FreeMemory]:
    """The remainders of this process's memory cgroups, and of their parents."""
    yield from filter(None, map(_left_by_cgroup, cgroup_folders("memory", root)))


def _left_by_cgroup(folder: Path) -> FreeMemory | None:
    """None without a limit. Inactive file pages count as free: the system drops them."""
    limits = [n for name in _CGROUP_LIMITS if (n := _number(folder / name)) is not None]
    used = next((n for name in _CGROUP_USES if (n := _number(folder / name)) is not None), None)
    if used is None or not limits:
        return None
    stat = dict(line.split()[:2] for line in system_text(folder / "memory.stat").splitlines() if line.count(" ") == 1)
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    limit = min(limits)
    return FreeMemory(max(0, limit - max(0, used - cached)), f"the {byte_size(limit)} of its cgroup")


def _left_by_limits() -> Iterator[FreeMemory]:
    sizes = first_values("/proc/self/status")
    for name, (size, shell) in _LIMITS.items():
        if size not in sizes:  # not Linux
            continue
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
        if soft != resource.RLIM_INFINITY:
            yield FreeMemory(max(0, soft - int(sizes[size].split()[0]) * 1024), f"{name} ({shell})")


def _number(path: Path) -> int | None:
    text = system_text(path).strip()
    return int(text) if text.isdigit() else None


def reset_peak_memory() -> None:
    """Restart `peak_memory_bytes` from now; no effect except on Linux."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc_pid_clear_refs(5): VmHWM


def peak_memory_bytes() -> int:
    """The most physical memory this process has had, mapped files included."""
    if high := first_values("/proc/self/status").get("VmHWM"):
        return int(high.split()[0]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): kilobytes on Linux, bytes on macOS


def private_memory_bytes() -> int | None:
    """Physical memory of this process without mapped files (code, weights): proc(5) RssAnon + RssShmem.

    None if the system does not distinguish them.
    """
    status = first_values("/proc/self/status")
    parts = [status.get(name) for name in ("RssAnon", "RssShmem")]
    return sum(int(part.split()[0]) * 1024 for part in parts if part) if all(parts) else None
