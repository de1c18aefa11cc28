"""Engines that the system gives no more memory: answers end, and later ones are whole."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

httpx2 = pytest.importorskip("httpx2")

from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import RUNTIME_SOURCES
from tests.conftest import Bundles
from tests.native.engine import Runtime
from tests.server.conftest import Running, running_server

pytestmark = pytest.mark.full  # compiles TVM's runtime
BODY = {"prompt": "A compiler is", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "deterministic": True}
LONG = {**BODY, "max_tokens": 40, "stream": True}
SOURCE = Path(__file__).with_name("failing_malloc.c")


@contextmanager
def refusing(program: Path, bundle: Path, folder: Path) -> Iterator[tuple[Running, Any, int]]:
    """A server, the plan of its allocations that fail (thread, passes, fails), and the thread of its engine."""
    library, file = folder / "failing_malloc.so", folder / "plan"
    subprocess.run(
        [*find_cxx().command, "-x", "c", "-D_GNU_SOURCE", "-shared", "-fPIC", SOURCE, "-o", library], check=True
    )
    np.zeros(3, np.int32).tofile(file)
    plan = np.memmap(file, np.int32, "r+")
    command = ("env", f"LD_PRELOAD={library}", f"FAILING_MALLOC={file}", program)
    options = ("-m", bundle, "--threads", 1, "--sequences", 4)
    with running_server(*options, program=command) as server:
        threads = {thread.id for thread in psutil.Process(server.process.pid).threads()} - {server.process.pid}
        assert len(threads) == 1  # connections have come none
        yield server, plan, threads.pop()
        assert server.end() == 0


def asked(server: Running, body: dict[str, Any] = BODY) -> Any:
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_allocations_of_the_engine_may_fail(program: Path, demo_bundles: Bundles, tmp_path: Path) -> None:
    """The n-th one of a request, and those after it: that request ends in words, and the next one is answered."""
    with refusing(program, demo_bundles["q4f16_1"], tmp_path) as (server, plan, engine):
        whole = asked(server).json()["choices"][0]["text"]
        plan[0], refused = engine, 0
        for fails in (1, 5):
            for passes in range(fails // 5, 160, 4):
                plan[1:] = passes, 0
                plan[2] = fails
                with httpx2.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as other:
                    answer = asked(server)
                    plan[2] = 0
                    ended = "".join(other.iter_text())
                assert other.status_code == 503 or ended.endswith("data: [DONE]\n\n")
                refused += 503 in (other.status_code, answer.status_code)
                if answer.status_code == 200:
                    assert answer.json()["choices"][0]["text"] == whole
                else:
                    assert answer.status_code == 503 and answer.json()["error"]["code"] == "out_of_memory", answer.text
                after = asked(server)
                assert after.status_code == 200 and after.json()["choices"][0]["text"] == whole
        assert refused > 10


def test_allocations_of_one_answer_may_fail(runtime: Runtime, demo_bundles: Bundles, tmp_path: Path) -> None:
    """An engine for one answer at a time, whose pages are used again: each of its allocations fails once."""
    program, library = tmp_path / "memory_ends", Path(runtime.library._name)
    words = ["-x", "c", "-std=gnu11", f"-I{RUNTIME_SOURCES}", SOURCE.with_name("memory_ends.c"), "-o", program]
    subprocess.run([*find_cxx().command, *words, "-x", "none", library, f"-Wl,-rpath,{library.parent}"], check=True)
    done = subprocess.run([program, demo_bundles["q4f16_1"], "120"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 10
