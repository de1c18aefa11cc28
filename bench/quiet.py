"""Runs a command on a quiet machine and says how much CPU others used meanwhile.

Runtimes whose threads wait for each other by spinning lose an order of magnitude when one thread is taken off
its core, so a number without the foreign load next to it means little. Linux and macOS (`os.times` counts no
children on Windows).
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from mlcpipe.errors import ResourceError

_WINDOW_S = 1.0
_USED = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True)
class Measured:
    """A command's output and circumstances: seconds, and cores that others or the hypervisor used.

    `children_cpu_s`: CPU seconds of the command and those of its descendants that somebody waited for.
    """

    stdout: str
    wall_s: float
    foreign_cores: float
    steal_cores: float
    children_cpu_s: float = 0.0

    def counting(self, cpu_s: float | None) -> Measured:
        """The same if the command and all its descendants used `cpu_s`, as they say: a browser's are not waited for."""
        if cpu_s is None or cpu_s <= self.children_cpu_s:
            return self
        foreign = self.foreign_cores - (cpu_s - self.children_cpu_s) / self.wall_s
        return replace(self, foreign_cores=max(foreign, 0.0), children_cpu_s=cpu_s)


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
    own, children = _own_cpu_s(), _children_cpu_s()
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
    steal = (stolen_after - stolen) / wall
    return Measured(done.stdout, wall, max(foreign, 0.0) / wall, steal, _children_cpu_s() - children)


def _machine_cpu_s() -> tuple[float, float]:
    """CPU seconds that all processes have used since boot, and those that the hypervisor gave to others."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in _USED), getattr(times, "steal", 0.0)


def _own_cpu_s() -> float:
    """CPU seconds of this process and of its children that ended."""
    times = os.times()
    return times.user + times.system + _children_cpu_s()


def _children_cpu_s() -> float:
    """CPU seconds of the children that ended."""
    times = os.times()
    return times.children_user + times.children_system
