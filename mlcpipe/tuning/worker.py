"""`python -m mlcpipe.tuning.worker` builds and measures candidates, and isolates those that crash or hang.

Reads one JSON job per line from stdin and writes one answer per line: `open` a kernel, then `measure` its choices.
Jobs come only from the parent process, over a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import tvm

from mlcpipe.compiler.backends import backend_of
from mlcpipe.errors import MlcpipeError
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuning import remote
from mlcpipe.tuning.devices import own_measuring
from mlcpipe.tuning.inputs import inputs_of
from mlcpipe.tuning.measure import Bench
from mlcpipe.tuning.ssh import target_there


class Worker:
    """Answers jobs; holds the last opened kernel."""

    def __init__(self) -> None:
        self._bench: Any = None  # a Bench of `measure`, `remote` or the backend's own module

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a job, or {"error": reason}."""
        run: Callable[[Mapping[str, Any]], dict[str, Any]] = self._open if job["do"] == "open" else self._measure
        try:
            return run(job)
        except MlcpipeError as error:
            return {"error": str(error)}

    def _open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if self._bench is not None:
            self._bench.close()
        self._bench = None  # frees its copies before new ones are made
        target, board = load_target(job["target"]), job["board"]
        if board:
            target = target_there(target, board["arch"])
        variant = next(v for v in compiled_variants(target) if v.name == job["variant"])
        func = tvm.ir.load_json(job["func"])
        inputs = inputs_of(func, job["rows"], job["keys"])
        if (own := own_measuring(target)) is not None:
            self._bench = own.Bench(target, variant, job["rule"], func, inputs)
        elif board:
            self._bench = remote.Bench(board["host"], target, variant, job["rule"], func, inputs)
        else:
            runner = backend_of(target).runner(target, variant)
            self._bench = Bench(runner, target, job["rule"], func, inputs, variant.schedule)
        return {"nbytes": self._bench.nbytes}

    def _measure(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        return {"pairs": self._bench.pairs(job["choice"], job["pairs"])}


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Answer jobs in order until the pipe closes."""
    worker = Worker()
    for line in jobs:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """Serve on stdin and stdout; library output goes to stderr."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes temporary folders
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
