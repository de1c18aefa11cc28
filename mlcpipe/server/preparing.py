"""Downloads, converts and compiles a model in a process of its own, so that its end costs the server nothing.

Run as `python -m mlcpipe.server.preparing`: the first line of its input has the arguments of `prepare_bundle`; it
answers with lines of JSON, which are the calls of a `Progress`, and last the bundle or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mlcpipe.errors import MlcpipeError, ResourceError, last_line
from mlcpipe.support.progress import Progress

_CALLS = ("stage", "bytes_total", "steps_total", "advance", "note")
_TURN = threading.Lock()  # one at a time: each takes all cores, and memory beyond the plan


class PreparingError(MlcpipeError):
    """The process's error, in its own words."""


class Preparation:
    """The bundle of a model that may have to be made first; `arguments` are those of `prepare_bundle`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    def bundle(self, progress: Progress) -> Path:
        """The bundle's folder, once it is made. Raises PreparingError, and ResourceError if the process is killed."""
        progress.stage("wait for another model to be prepared")
        with _TURN:
            self._check_wanted()
            progress.stage("prepare")
            command = [sys.executable, "-m", "mlcpipe.server.preparing"]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
                self._process = process
                try:
                    self._check_wanted()
                    return self._followed(process, progress)
                finally:
                    self._process = None
                    process.kill()

    def _check_wanted(self) -> None:
        if self._stopped:
            raise ResourceError("the model is not prepared", found="nobody waits for it any more")

    def _followed(self, process: subprocess.Popen[str], progress: Progress) -> Path:
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):
            process.stdin.write(json.dumps(self._arguments) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            told = json.loads(line)
            if "bundle" in told:
                return Path(told["bundle"])
            if "error" in told:
                raise PreparingError(told["error"])
            getattr(progress, told["call"])(told["value"])
        found = f"exit status {process.wait()}"
        raise ResourceError("the process that prepares the model was ended", found=found, next_step="ask again")

    def stop(self) -> None:
        """End the process: what it has downloaded stays."""
        self._stopped = True
        if (process := self._process) is not None:
            process.terminate()


class _Told:
    """A `Progress` that writes its calls as lines."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def tell(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(name)
        return lambda value: self.tell(call=name, value=value)


def _run() -> None:
    """Prepare one model, and end with the process that asked."""
    with suppress(OSError):  # the system, short of memory, ends this process before the server
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what others print is no answer
    told, arguments = _Told(out), json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from mlcpipe.loading import prepare_bundle

        told.tell(bundle=str(prepare_bundle(**arguments, progress=told)))
    except MlcpipeError as error:
        told.tell(error=str(error))
    except Exception as error:
        told.tell(error=f"{type(error).__name__}: {last_line(error)}")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    _run()
