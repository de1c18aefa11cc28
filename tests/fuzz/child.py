"""Runs the command line in a forked child with bounded memory and time."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60  # of processor time: other work on the machine makes no finding
HANGS_S = 600  # of time, in which a command that does not compute hangs
MAX_ADDRESS_BYTES = 12 << 30
MAX_RESIDENT_BYTES = 2 << 30
_GOOD = re.compile(r"error: [^\n]{1,1500}\n")


@dataclass(frozen=True)
class Outcome:
    """How a command ended; `status` is the exit code, or minus the signal, `seconds` are of processor time,
    or all of them where it hangs.
    """

    command: tuple[str, ...]
    status: int
    seconds: float
    resident_bytes: int
    errors: str

    @property
    def finding(self) -> str:
        """What is wrong with it, "" for nothing."""
        if self.seconds >= LIMIT_S:
            return f"took {self.seconds:.0f} s"
        if self.resident_bytes > MAX_RESIDENT_BYTES:
            return f"took {self.resident_bytes >> 20} MiB"
        if self.status not in (0, 2):
            return f"exit {self.status}" if self.status > 0 else f"signal {-self.status}"
        lines = self.errors.splitlines(keepends=True)
        if self.status == 2 and (not lines or not _GOOD.fullmatch(lines[-1])):
            return "exit 2 without its line"
        if any(word in self.errors for word in ("Traceback", "panicked at", "this is a bug")):
            return "more than words on stderr"
        return ""


def run(command: list[str], log: Path) -> Outcome:
    """Run `mlcpipe command...`. stderr goes to `log`. The parent must have imported what children need, and no threads."""
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _serve(command, log)
    status, usage = _wait(child, began)
    code = os.waitstatus_to_exitcode(status)
    errors = log.read_bytes().decode("utf-8", "replace")
    seconds = time.monotonic() - began
    if seconds < HANGS_S:
        seconds = usage.ru_utime + usage.ru_stime
    return Outcome(tuple(command), code, seconds, usage.ru_maxrss << 10, errors)


def _serve(command: list[str], log: Path) -> None:
    code = 99
    try:
        os.nice(19)
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        from mlcpipe.cli import main

        code = main(command)
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int, began: float) -> tuple[int, resource.struct_rusage]:
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        if time.monotonic() - began >= HANGS_S:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage
        time.sleep(0.005)


def as_line(seed: int, outcome: Outcome) -> str:
    """A finding as JSON."""
    return json.dumps(
        {"seed": seed, "finding": outcome.finding, "command": outcome.command, "stderr": outcome.errors[-400:]}
    )
