"""Commands on a board, over the user's own ssh: one connection each, no questions, no forwarding.

Only bytes cross it: our script with its input goes there, bounded text comes back. The board is not trusted: no
protocol lets it ask for anything, and its text is treated as data.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mlcpipe.devices.base import record_name
from mlcpipe.errors import TargetError, UsageError, last_line
from mlcpipe.host.cpu import linux_cpu_model
from mlcpipe.host.cpu_features import ARCHITECTURES, architecture_of, from_cpuinfo
from mlcpipe.host.proc import first_values_of
from mlcpipe.targets import Target, triple

MAX_ANSWER_BYTES = 1 << 20
_OPTIONS = (
    "BatchMode=yes", "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "ControlMaster=no",
    "ConnectTimeout=15", "ServerAliveInterval=10", "LogLevel=ERROR",
)  # fmt: skip
_LOOK = "cat /proc/cpuinfo; uname -m"
_LOOK_S = 30.0
_SSH_FAILED = 255  # the exit status of ssh itself


@dataclass(frozen=True)
class Board:
    """A machine with Linux that ssh reaches as `host`: its architecture, the name and the features of its CPU."""

    host: str
    arch: str
    cpu: str
    features: frozenset[str]


def look_at(host: str) -> Board:
    """Describe a board. Raises UsageError for a string that ssh would not accept as a host, and TargetError."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@%/\[\]-]{0,254}", host):
        raise UsageError("--ssh", expected="a host as `ssh` takes it, such as pi@board.local", found=repr(host)[:80])
    cpuinfo, _, machine = run(host, _LOOK, _LOOK_S).rstrip().rpartition("\n")
    arch = architecture_of(machine)
    if arch not in ARCHITECTURES:
        raise TargetError("no CPU to measure", where=host, expected=f"Linux on {' or '.join(ARCHITECTURES)}",
                          found=repr(machine[:80]))  # fmt: skip
    cpu = linux_cpu_model(first_values_of(cpuinfo)) or machine
    return Board(host, arch, record_name(cpu), from_cpuinfo(cpuinfo))


def target_there(target: Target, arch: str) -> Target:
    """The target with code for Linux on `arch`. Raises TargetError if it is for another device or system."""
    if target.backend != "cpu":
        raise TargetError(
            "--ssh measures CPUs", where=target.name, expected="a target of a CPU",
            next_step="for a GPU, run `mlcpipe tune` on its machine",
        )  # fmt: skip
    if "mtriple" not in target.tvm:
        return replace(target, tvm={**target.tvm, "mtriple": f"{arch}-unknown-linux-gnu"})
    if architecture_of(triple(target)) != arch or "linux" not in triple(target):
        raise TargetError("the target is for another machine", where=target.name, expected=f"Linux on {arch}",
                          found=triple(target))  # fmt: skip
    return target


def run(host: str, script: str, limit_s: float, given: Path | str = os.devnull) -> str:
    """The output of a script, without single quotes, on a board with the file `given` as its input.

    Raises TargetError if it fails, prints more than MAX_ANSWER_BYTES or takes longer than `limit_s`.
    """
    ssh = shutil.which("ssh")
    if ssh is None:
        raise TargetError("no ssh", next_step="install OpenSSH's client")
    options = [word for option in _OPTIONS for word in ("-o", option)]
    command = [ssh, "-T", *options, "--", host, f"sh -c '{script}'"]
    ends = time.monotonic() + limit_s
    with (
        Path(given).open("rb") as stdin,
        subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process,
    ):
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            answer = process.stdout.read(MAX_ANSWER_BYTES + 1)
            if len(answer) > MAX_ANSWER_BYTES:
                raise TargetError("the board's answer is too long", where=host, expected=f"{MAX_ANSWER_BYTES} bytes")
            status = process.wait()
        finally:
            process.kill()
            timer.cancel()
    if time.monotonic() >= ends:
        raise TargetError("the board took too long", where=host, expected=f"at most {limit_s:.0f} s")
    text = answer.decode(errors="replace")
    if status:
        advice = f"`ssh {host}` must work without a question" if status == _SSH_FAILED else None
        found = f"exit status {status}: {last_line(text)}" if text.strip() else f"exit status {status}"
        raise TargetError("the board failed", where=host, found=found, next_step=advice)
    return text
