"""`python -m mlcpipe.tuning.worker` builds and measures candidates: one that crashes or hangs costs only itself.

Reads a job a line as JSON from stdin and writes its answer as a line: `open` a kernel, then `measure` choices of it.
What it gets comes from the process that started it, over a pipe; it listens to nobody else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import tvm

from mlcpipe.errors import MlcpipeError
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.tuning.inputs import inputs_of
from mlcpipe.tuning.measure import Bench, local_runner
from mlcpipe.tuning.remote import Address, RemoteCpu
from mlcpipe.tuning.webgpu import WebBench


class Worker:
    """Answers jobs; holds the kernel that was opened last."""

    def __init__(self) -> None:
        self._bench: Bench | WebBench | None = None

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What a job found, or {"error": why it could not be done}."""
        does: Callable[[Mapping[str, Any]], dict[str, Any]] = self._open if job["do"] == "open" else self._measure
        try:
            return does(job)
        except MlcpipeError as error:
            return {"error": str(error)}

    def _open(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(self._bench, WebBench):
            self._bench.close()
        self._bench = None  # its copies go before the next ones come
        target = load_target(job["target"])
        variant = next(one for one in compiled_variants(target) if one.name == job["variant"])
        func = tvm.ir.load_json(job["func"])
        given = inputs_of(func, job["rows"], job["keys"])
        if target.link == "wasm":
            self._bench = WebBench(target, variant, job["rule"], func, given)
        else:
            address = job.get("rpc")
            runner = RemoteCpu(target, variant, Address(**address)) if address else local_runner(target, variant)
            self._bench = Bench(runner, target, job["rule"], func, given, variant.schedule)
        return {"nbytes": self._bench.nbytes}

    def _measure(self, job: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bench is not None
        return {"pairs": self._bench.pairs(job["choice"], job["pairs"])}


def serve(jobs: TextIO, answers: TextIO) -> None:
    """Answer one job after the other until the pipe is closed."""
    worker = Worker()
    for line in jobs:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> None:
    """Serve on stdin and stdout; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
