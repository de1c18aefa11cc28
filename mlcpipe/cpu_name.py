"""What the processor of this machine is called."""

from __future__ import annotations

import platform
import sys
from pathlib import Path


def cpu_model() -> str:
    """The processor's name as its maker wrote it, or the architecture where the system does not tell."""
    if sys.platform == "win32":
        return _windows_cpu_model() or platform.processor() or platform.machine()
    if sys.platform == "darwin":
        return _first_line("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    for key in ("model name", "Model", "Hardware"):
        if value := first_of("/proc/cpuinfo").get(key):
            return value
    return platform.machine()


def first_of(path: str) -> dict[str, str]:
    """The first value of each "key: value" line of a file in /proc; {} where there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    entries: dict[str, str] = {}
    for key, colon, value in pairs:
        if colon:
            entries.setdefault(key.strip(), value.strip())
    return entries


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
