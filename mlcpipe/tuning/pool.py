"""The parent side of the worker process: jobs with a time limit, restarts after a crash or hang."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from mlcpipe.errors import MlcpipeError

_START_S = 60.0  # to import TVM, on a busy machine
_END_S = 5.0
_LIMIT_S = 240.0


class WorkerError(MlcpipeError):
    """A job that failed; later jobs can still run."""


class LineProcess:
    """A process that answers each line of JSON with one; started on first use, and again after it dies.

    `own_session`: Ctrl-C reaches only the parent, which then ends this process.
    """

    def __init__(self, command: tuple[str, ...], *, own_session: bool) -> None:
        self._command, self._own_session = command, own_session
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115, closed in __exit__

    @property
    def running(self) -> bool:
        """Whether the process is running."""
        return self._process is not None

    def ask(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The answer to a job. Raises WorkerError if the process dies, or is killed after `limit_s`."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self.close()
            raise WorkerError("the measurement took too long", expected=f"at most {limit_s:.0f} s") from None
        except OSError:
            line = ""
        if not line:
            reason = self._died(process)
            self.close()
            raise WorkerError("the measuring process died", found=reason)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._stderr.truncate(0)
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                start_new_session=self._own_session,
            )
            self._answers = queue.Queue()
            threading.Thread(target=_read, args=(self._process, self._answers), daemon=True).start()
        return self._process

    def _died(self, process: subprocess.Popen[str]) -> str:
        """The exit status of a process whose pipe closed, and its final error line."""
        try:
            status = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "it stopped answering"
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read()[-4000:].splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line] or lines or ["no message"]
        return f"exit status {status}: {errors[-1][:200]}"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if self._own_session and process.returncode is None and sys.platform != "win32":
                with suppress(OSError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, signal.SIGTERM)  # and its children, such as ssh
                    process.wait(_END_S)
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):  # the dead process may have left input unread
                process.stdin.close()

    def __enter__(self) -> LineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._stderr.close()


class WorkerProcess:
    """`mlcpipe.tuning.worker`, or `command`, with its open kernel."""

    def __init__(self, *, limit_s: float = _LIMIT_S, command: tuple[str, ...] = ()) -> None:
        command = command or (sys.executable, "-m", "mlcpipe.tuning.worker")
        self._line, self._limit_s = LineProcess(command, own_session=True), limit_s
        self._opened: Mapping[str, Any] | None = None

    def open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Open a kernel; reopened after a restart. Raises WorkerError."""
        self._opened = None
        answer = self._ask({"do": "open", **job}, _START_S + self._limit_s)
        self._opened = job
        return answer

    def measure(self, choice: Mapping[str, int], pairs: int) -> list[tuple[float, float]]:
        """Interleaved seconds of the open kernel's default and a choice. Raises WorkerError."""
        if not self._line.running and self._opened is not None:
            self.open(self._opened)
        answer = self._ask({"do": "measure", "choice": dict(choice), "pairs": pairs}, self._limit_s)
        return [(float(default), float(candidate)) for default, candidate in answer["pairs"]]

    def _ask(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        answer = self._line.ask(job, limit_s)
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.__exit__(kind, error, trace)


def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    """Forward answers; "" marks the end."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            answers.put(line)
    answers.put("")
