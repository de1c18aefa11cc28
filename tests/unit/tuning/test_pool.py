"""The measuring process: it may die or hang, and the next candidate is measured all the same."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from mlcpipe.tuning.pool import WorkerError, WorkerProcess

# Answers as `mlcpipe.tuning.worker` does; a choice says what becomes of the process.
FAKE = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    job = json.loads(line)
    what = job.get("choice", {}).get("what", 0)
    if what == 1:
        sys.stderr.write("RuntimeError: this one dies\\nnote: more\\n"); sys.stderr.flush(); os._exit(3)
    if what == 2:
        time.sleep(60)
    if what == 3:
        print(json.dumps({"error": "it does not compile"}), flush=True); continue
    child = subprocess.Popen(["sleep", "600"]).pid if what == 4 else 0
    answer = {"pairs": [[1.0, 0.5]] * job.get("pairs", 0), "nbytes": 7, "pid": os.getpid(), "child": child}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> WorkerProcess:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return WorkerProcess(limit_s=1.0, command=(sys.executable, str(script)))


def test_a_death_or_a_hang_costs_one_measurement(worker: WorkerProcess) -> None:
    with worker:
        first = worker.open({"rows": 1})["pid"]
        assert worker.measure({"what": 0}, 2) == [(1.0, 0.5)] * 2
        with pytest.raises(WorkerError, match=r"exit status 3: RuntimeError: this one dies"):
            worker.measure({"what": 1}, 2)
        assert worker.measure({"what": 0}, 1) == [(1.0, 0.5)]
        with pytest.raises(WorkerError, match="too long"):
            worker.measure({"what": 2}, 2)
        with pytest.raises(WorkerError, match="it does not compile"):
            worker.measure({"what": 3}, 2)
        assert worker.open({"rows": 2})["pid"] != first


def test_nothing_runs_afterwards(worker: WorkerProcess) -> None:
    with worker:
        child = psutil.Process(worker.open({"rows": 1, "choice": {"what": 4}})["child"])
        process = worker._line._process
    assert process is not None and process.returncode is not None
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
