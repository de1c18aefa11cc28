"""`mlcpipe serve --ray 1 --stages N` on a cluster of several nodes here: the bits of one process; stages that end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

pytest.importorskip("ray", reason="ray runs the stages")
pytest.importorskip("fastapi")
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # Ray's own: of its files and processes
]

from ray.cluster_utils import Cluster

from tests.conftest import CutModel
from tests.server.conftest import Running, running_server

STAGE, LAST = "ray::StageProcess", "ray::LastStage"
PROMPTS = [[(step * place + first) % 250 for place in range(60)] for step, first in ((7, 0), (11, 3), (13, 90))]
TOKENS = 150


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """A Ray cluster of nodes on this machine, which programs that tests start join."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", made.address)
        try:
            for _ in range(nodes - 1):
                made.add_node(num_cpus=1)
            yield made
        finally:
            made.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture(scope="module")
def own_bundle(cut_model: CutModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in two stages, of which a test may take files away."""
    return Path(shutil.copytree(cut_model[2, 2], tmp_path_factory.mktemp("ray") / "bundle"))


@pytest.fixture(scope="module")
def staged(two_nodes: Cluster, own_bundle: Path) -> Iterator[Running]:
    with running_server(
        own_bundle, "--ray", 1, "--stages", 2, "--name", "model", "--threads", 1, "--sequences", 2, "--max-queue", 3
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def expected(cut_model: CutModel) -> list[dict[str, Any]]:
    """The answers of one process."""
    with running_server(cut_model[()], "--name", "model", "--threads", 1, "--sequences", 2) as running:
        return answers(running)


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 3, **more}


def ask(running: Running, prompt: list[int], **more: Any) -> httpx2.Response:
    return httpx2.post(f"{running.url}/v1/completions", json=body(prompt, **more), timeout=120)


def answers(running: Running) -> list[dict[str, Any]]:
    """The text and the log-probabilities of all prompts, asked together."""
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = [*threads.map(lambda prompt: ask(running, prompt), PROMPTS)]
    assert [one.status_code for one in found] == [200] * len(PROMPTS), [one.text for one in found]
    return [one.json()["choices"][0] for one in found]


def pids(name: str) -> list[int]:
    """Processes of actors of this name, of this test's cluster."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any(name in part for part in one.cmdline()):
                found.append(one.pid)
    return found


def stream(running: Running, prompt: list[int], begun: Callable[[], object]) -> tuple[str, str]:
    """The text of a stream, and how it ended: "whole", or the code of its error event; `begun` after the first event."""
    text, end, first = "", "cut", True
    with httpx2.stream(
        "POST", f"{running.url}/v1/completions", json=body(prompt, stream=True), timeout=120
    ) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, "whole" if end == "cut" else end
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    end = event["error"]["code"]
                elif choices := event.get("choices"):
                    text += choices[0]["text"]
                    if first:
                        begun()
                        first = False
    return text, end


def wait_until(done: Callable[[], bool], within_s: float = 90) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.2)


def test_answers_have_the_bits_of_one_process(staged: Running, expected: list[dict[str, Any]]) -> None:
    assert answers(staged) == expected
    assert len(pids(STAGE)) == len(pids(LAST)) == 1
    assert "mlcpipe_request_success_total" in httpx2.get(f"{staged.url}/metrics").text
    assert any(line.startswith("layers 0-1 on ") for line in staged.lines)


def test_three_nodes(cut_model: CutModel, expected: list[dict[str, Any]]) -> None:
    with (
        cluster(3),
        running_server(cut_model[1, 2, 1], "--ray", 1, "--stages", "1,2,1", "--name", "model", "--threads", 1) as three,
    ):
        assert answers(three) == expected


@pytest.mark.parametrize("name", [STAGE, LAST])
def test_a_killed_stage_ends_its_answers_and_comes_back(
    staged: Running, expected: list[dict[str, Any]], name: str
) -> None:
    before = pids(name)
    text, end = stream(staged, PROMPTS[0], lambda: [os.kill(one, signal.SIGKILL) for one in before])
    assert end == "stage_ended" and expected[0]["text"].startswith(text) and len(text) < len(expected[0]["text"])
    wait_until(lambda: ask(staged, PROMPTS[1], max_tokens=2).status_code == 200)
    assert answers(staged) == expected
    assert not set(pids(name)) & set(before) and len(pids(name)) == 1


def test_a_slow_stage_is_waited_for_and_a_full_queue_is_refused(
    staged: Running, expected: list[dict[str, Any]]
) -> None:
    """Two answers are computed and three wait: others hear 503, and when they may come again."""
    (stage,) = pids(STAGE)
    slow = psutil.Process(stage)
    with ThreadPoolExecutor(12) as threads:
        first = threads.submit(stream, staged, PROMPTS[0], slow.suspend)
        wait_until(lambda: slow.status() == psutil.STATUS_STOPPED)
        others = [threads.submit(ask, staged, PROMPTS[1]) for _ in range(10)]
        wait_until(lambda: sum(one.done() for one in others) > 3)
        slow.resume()
        assert first.result() == (expected[0]["text"], "whole")
        found = [one.result() for one in others]
    statuses = [one.status_code for one in found]
    assert {*statuses} == {200, 503} and statuses.count(503) > 3
    for one in found:
        if one.status_code == 200:
            assert one.json()["choices"][0] == expected[1]
        else:
            assert one.json()["error"]["code"] == "overloaded" and int(one.headers["retry-after"]) > 0


def refused(bundle: Path, *options: object) -> str:
    """The line of a server that does not start."""
    command = [sys.executable, "-m", "mlcpipe", "serve", bundle, "--ray", 1, "--port", 0, *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()[-1]


def test_what_does_not_start(two_nodes: Cluster, cut_model: CutModel, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(cut_model[2, 2], tmp_path / "bundle"))
    (bundle / "layers-0-1" / "lib" / "model.so").unlink()
    line = refused(bundle, "--stages", 2)
    assert line.startswith(f"error: no machine has layers-0-1 of the bundle in {bundle}; expected the folder of each")
    assert "3 machines in the Ray cluster" in refused(cut_model[1, 2, 1], "--stages", 3)
    assert "found stages of 2,2 layers" in refused(cut_model[2, 2], "--stages", "1,3")


def test_without_a_cluster(cut_model: CutModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert "expected a Ray cluster that this machine is in" in refused(cut_model[2, 2], "--stages", 2)


def test_sigterm_ends_answers_and_stages(staged: Running) -> None:
    assert len(pids(STAGE)) == 1
    assert staged.end(within_s=60) == 0
    wait_until(lambda: not pids(STAGE) and not pids(LAST))
    assert not any("Traceback" in line for line in staged.lines)
