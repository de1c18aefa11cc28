"""The memory plan before anything is loaded is what a run takes at most."""

from __future__ import annotations

import json
import string
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mlcpipe
from bench.bench_native import peak_private_bytes, private_bytes
from bench.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.full  # compiles TVM's runtime
CONTEXT = 1024


@pytest.mark.parametrize("model", ["llama-25m", pytest.param("smollm2-360m", marks=pytest.mark.everything)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_takes_what_was_planned(model: str, threads: int, program: Path, tmp_path: Path) -> None:
    """Private memory of a process with a full context: of the plan's sum within 5 %, or within 2 MB for a small model."""
    source = make_checkpoint(model, tmp_path / "checkpoint", tokenizer=True)
    bundle = mlcpipe.compile(source, target="cpu-native", quantization="q4f16_1", output=tmp_path / "bundle")
    given = ["-m", str(bundle), "--context", str(CONTEXT), "--threads", str(threads), "--json"]
    done = subprocess.run([program, "doctor", *given], capture_output=True, check=True)
    plan = json.loads(done.stdout)
    taken = peak_private_bytes(
        [str(program), "bench", *given, "--prompt-tokens", str(CONTEXT - 4), "--max-tokens", "4"]
    )
    private = plan["kv_bytes"] + plan["workspace_bytes"]
    assert abs(taken - private) <= max(2e6, 0.05 * (plan["weights_bytes"] + private)), (taken, plan)


@pytest.mark.parametrize("model", ["llama-25m", pytest.param("smollm2-360m", marks=pytest.mark.everything)])
@pytest.mark.parametrize("sequences", [4, 8])
def test_several_answers_take_what_was_planned(model: str, sequences: int, program: Path, tmp_path: Path) -> None:
    """All of them with full contexts, of prompts that share nothing."""
    httpx2 = pytest.importorskip("httpx2")
    from tests.server.conftest import running_server

    source = make_checkpoint(model, tmp_path / "checkpoint", tokenizer=True)
    bundle = mlcpipe.compile(source, target="cpu-native", quantization="q4f16_1", output=tmp_path / "bundle")
    words = ["-m", str(bundle), "--context", str(CONTEXT), "--threads", "2", "--sequences", str(sequences)]
    words += ["--kv-tokens", str(sequences * CONTEXT)]
    plan = json.loads(subprocess.run([program, "doctor", *words, "--json"], capture_output=True, check=True).stdout)
    taken = 0
    with running_server(*words, program=[program]) as server, ThreadPoolExecutor(sequences) as clients:
        bodies = [
            {"prompt": letter * (CONTEXT - 8), "max_tokens": 8, "ignore_eos": True}
            for letter in string.ascii_lowercase[:sequences]
        ]
        answers = [
            clients.submit(httpx2.post, f"{server.url}/v1/completions", json=body, timeout=300) for body in bodies
        ]
        while not all(answer.done() for answer in answers):
            taken = max(taken, private_bytes(server.process.pid))
            time.sleep(0.005)
        usages = [answer.result().json()["usage"] for answer in answers]
    assert [usage["total_tokens"] for usage in usages] == [CONTEXT] * sequences
    private = plan["kv_bytes"] + plan["workspace_bytes"]
    assert abs(taken - private) <= max(2e6, 0.05 * (plan["weights_bytes"] + private)), (taken, plan)
