"""Runs a command on a quiet machine and says how much CPU others used meanwhile.

Runtimes whose threads wait for each other by spinning lose an order of magnitude when one thread is taken off
its core, so a number without the foreign load beside it means little. Linux and macOS (`os.times` counts no
children on Windows).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from mlcpipe.errors import ResourceError

_WINDOW_S = 1.0
_USED = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class Measured:
    """What a command printed and how it ran: seconds, and cores that others or the hypervisor used."""

    stdout: str
    wall_s: float
    foreign_cores: float
    steal_cores: float


def wait_until_quiet(limit_cores: float, patience_s: float) -> bool:
    """Wait for one second in which all processes together use at most `limit_cores`; False if none came."""
    deadline = time.monotonic() + patience_s
    while True:
        before = _machine_cpu_s()[0]
        time.sleep(_WINDOW_S)
        if (_machine_cpu_s()[0] - before) / _WINDOW_S <= limit_cores:
            return True
        if time.monotonic() > deadline:
            return False


def run_measured(command: Sequence[str], *, timeout_s: float) -> Measured:
    """Run `command`. Raises ResourceError if it fails or takes too long."""
    used, stolen = _machine_cpu_s()
    own = _own_cpu_s()
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except OSError as error:
        raise ResourceError(f"{command[0]} cannot be run", found=error.strerror) from error
    except subprocess.TimeoutExpired as error:
        raise ResourceError(
            f"{command[0]} did not end", expected=f"an end within {timeout_s:.0f} s", next_step="use --timeout"
        ) from error
    wall = time.monotonic() - began
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing printed").splitlines()[-1]
        raise ResourceError(" ".join(command) + " failed", found=f"exit status {done.returncode}: {last}")
    used_after, stolen_after = _machine_cpu_s()
    foreign = used_after - used - (_own_cpu_s() - own)
    return Measured(done.stdout, wall, max(foreign, 0.0) / wall, (stolen_after - stolen) / wall)


def _machine_cpu_s() -> tuple[float, float]:
    """CPU seconds that all processes have used since boot, and those that the hypervisor gave to others."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in _USED), getattr(times, "steal", 0.0)


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
