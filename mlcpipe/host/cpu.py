"""The processor of this machine: its name, its instruction sets, its cores."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping

from mlcpipe.host import cpu_features
from mlcpipe.host.cgroups import cpu_quota
from mlcpipe.host.proc import first_values

# Those of cpu_features.py that kernels use.
_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimdhp", "asimddp", "i8mm", "bf16", "sve",
    "sve2",
)  # fmt: skip


def cpu_model() -> str:
    """The processor's marketing name, or the architecture if the system does not report it."""
    if sys.platform == "win32":
        return _windows_cpu_model() or platform.processor() or platform.machine()
    if sys.platform == "darwin":
        return _first_line("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return linux_cpu_model(first_values("/proc/cpuinfo")) or platform.machine()


def linux_cpu_model(cpuinfo: Mapping[str, str]) -> str:
    """The processor's name of the first values in Linux's /proc/cpuinfo; "" if it has none."""
    return next((cpuinfo[key] for key in ("model name", "Model", "Hardware") if cpuinfo.get(key)), "")


def kernel_features() -> list[str]:
    """This processor's instruction sets that matter to kernels; [] if the system does not report them."""
    present = cpu_features.host_features()
    return [name for name in _FEATURES if name in present]


def core_counts() -> tuple[int, int]:
    """Physical cores and logical processors that this process may use, at least 1.

    Of a container that has a share of the processors' time, as many cores as that is.
    """
    import psutil

    logical, quota = _usable_processors(), cpu_quota()
    cores = min(psutil.cpu_count(logical=False) or logical, logical)
    return (cores if quota is None else max(1, min(cores, int(quota)))), logical


def _windows_cpu_model() -> str:
    if sys.platform != "win32":
        return ""
    import winreg

    path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
    try:
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    except OSError:
        return ""


def _first_line(*command: str) -> str:
    import subprocess

    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def _usable_processors() -> int:
    import psutil

    try:
        return len(psutil.Process().cpu_affinity())
    except AttributeError:  # macOS has no affinity
        return psutil.cpu_count() or 1
