"""`mlcpipe serve --ray`: two replicas, of which one is killed, or both are replaced, while they answer."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

pytest.importorskip("ray", reason="ray runs the replicas")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import Running, running_server

CHAT = "/v1/chat/completions"
TOKENS = 1200
REPLICA = "ray::ServeReplica"
TOPICS = "compile", "bundle", "target", "kernel", "page", "token", "weight", "grammar"


@pytest.fixture(scope="module")
def own_bundle(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, which a test may take away."""
    return Path(shutil.copytree(demo_bundle, tmp_path_factory.mktemp("replicas") / "demo"))


@pytest.fixture(scope="module")
def replicas(own_bundle: Path) -> Iterator[Running]:
    with running_server(own_bundle, "--ray", 2, "--threads", 1, "--sequences", 8, "--drain", 20) as running:
        yield running


def body(topic: str, **more: Any) -> dict[str, Any]:
    question = [{"role": "user", "content": f"{topic} " * 30 + "?"}]
    return {"messages": question, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, **more}


def pids(running: Running) -> set[int]:
    """Of the replicas' processes."""
    found = set()
    for one in psutil.Process(running.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if any(REPLICA in part for part in one.cmdline()):
                found.add(one.pid)
    return found


def wait_for_replicas(running: Running, count: int = 2, within_s: float = 90) -> None:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        # For a moment after a kill, Ray has not noticed it.
        if len(pids(running)) == count == httpx2.get(f"{running.url}/health").json().get("replicas"):
            return
        time.sleep(0.5)
    raise AssertionError("the replicas do not come back")


async def stream(client: httpx2.AsyncClient, topic: str, begun: asyncio.Semaphore, **more: Any) -> tuple[str, str]:
    """The text, and how it ended: "whole", the code of an error event, or "cut"; `begun` is released at its start."""
    text, end = "", "cut"
    async with client.stream("POST", CHAT, json=body(topic, stream=True, **more)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text, "whole" if end == "cut" else end
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                end = event["error"]["code"]
            elif content := event["choices"][0]["delta"].get("content"):
                if not text:
                    begun.release()
                text += content
    return text, "cut"


async def streams(running: Running, kill: int | None = None) -> dict[str, tuple[str, str]]:
    """A stream for each topic, each begun when the one before has; `kill` is the process that is killed then.

    Of requests in the same instant, Ray's policy sends all to one replica.
    """
    begun, tasks = asyncio.Semaphore(0), []
    async with httpx2.AsyncClient(base_url=running.url, timeout=120) as client:
        for topic in TOPICS:
            tasks.append(asyncio.ensure_future(stream(client, topic, begun)))
            await begun.acquire()
        if kill is not None:
            psutil.Process(kill).kill()
            others = [client.post(CHAT, json=body(f"{topic} again", max_tokens=5)) for topic in TOPICS]
            assert {one.status_code for one in await asyncio.gather(*others)} == {200}, "who comes after it"
        return dict(zip(TOPICS, await asyncio.gather(*tasks)))


def test_a_killed_replica_ends_its_own_streams_and_comes_back(replicas: Running) -> None:
    expected = asyncio.run(streams(replicas))
    assert {end for _, end in expected.values()} == {"whole"}
    before = pids(replicas)
    assert len(before) == 2
    found = asyncio.run(streams(replicas, kill=min(before)))
    ended = {topic for topic, (_, end) in found.items() if end == "replica_ended"}
    assert 0 < len(ended) < len(TOPICS), "the streams of one replica, and of one alone"
    for topic, (text, end) in found.items():
        whole = expected[topic][0]
        assert whole.startswith(text) and (
            end == "replica_ended" if topic in ended else (text, end) == (whole, "whole")
        )
    wait_for_replicas(replicas)
    assert len(pids(replicas) & before) == 1 and len(pids(replicas)) == 2
    assert asyncio.run(streams(replicas)) == expected


def test_a_conversation_stays_with_the_replica_that_knows_it(replicas: Running) -> None:
    with httpx2.Client(base_url=replicas.url, timeout=60) as client:
        for topic in ("tensor", "shader", "vector", "matrix"):
            asked = [client.post(CHAT, json=body(topic, max_tokens=2)).json()["usage"] for _ in range(3)]
            cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in asked]
            assert cached[0] < 32 <= min(cached[1:]), topic


def test_who_leaves_is_not_computed_further(replicas: Running) -> None:
    def count(client: httpx2.Client, name: str, label: str = "") -> float:
        lines = client.get("/metrics").text.splitlines()
        return sum(float(one.split()[-1]) for one in lines if one.startswith(f"mlcpipe_{name}{{") and label in one)

    with httpx2.Client(base_url=replicas.url, timeout=60) as client:
        text = client.get("/metrics").text
        assert len(set(re.findall(r'num_requests_running{replica="(\w+)"}', text))) == 2
        before = count(client, "request_success_total", 'finished_reason="cancelled"')
        for topic in TOPICS[:3]:
            with client.stream("POST", CHAT, json=body(topic, stream=True, max_tokens=1500)) as response:
                next(response.iter_lines())
        end = time.monotonic() + 20
        while count(client, "request_success_total", 'finished_reason="cancelled"') < before + 3:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert not count(client, "num_requests_running")


def test_what_is_of_one_engine_is_refused(replicas: Running) -> None:
    with httpx2.Client(base_url=replicas.url) as client:
        assert client.post("/v1/kv/save", json={"prompt": "a", "name": "b"}).json()["error"]["code"] == "not_found"
        refused = client.post(CHAT, json={"messages": "no list"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_body")
        assert client.post(CHAT, json={}, headers={"host": "other.example"}).status_code == 421


def ask_until(running: Running, done: Callable[[], bool], within_s: float) -> int:
    """Ask one question after the other, each of which must be answered -> how many there were."""
    end, asked = time.monotonic() + within_s, 0
    with httpx2.Client(base_url=running.url, timeout=60) as client:
        while not done():
            assert time.monotonic() < end, "it does not come to that"
            answer = client.post(CHAT, json=body(TOPICS[asked % len(TOPICS)], max_tokens=20))
            assert answer.status_code == 200, answer.text
            asked += 1
    return asked


def replace_all(running: Running) -> int:
    """Replace the replicas -> how many questions were answered meanwhile."""
    before = pids(running)
    running.process.send_signal(signal.SIGHUP)
    asked = ask_until(running, lambda: not pids(running) & before and len(pids(running)) >= 2, 120)
    wait_for_replicas(running)
    return asked


def test_sighup_replaces_the_replicas_one_by_one(replicas: Running) -> None:
    """And no request that comes meanwhile fails."""
    wait_for_replicas(replicas)
    assert replace_all(replicas) > 10


def test_sighup_that_fails_is_a_line_and_the_others_go_on(replicas: Running, own_bundle: Path) -> None:
    wait_for_replicas(replicas)
    before, said = pids(replicas), len(replicas.lines)
    own_bundle.rename(own_bundle.with_name("away"))
    replicas.process.send_signal(signal.SIGHUP)
    ask_until(replicas, lambda: len(replicas.lines) > said, 240)
    assert pids(replicas) & before
    own_bundle.with_name("away").rename(own_bundle)
    replace_all(replicas)
    (line,) = replicas.lines[said:]
    assert re.fullmatch(r"error: the replicas are not all replaced; found .*no bundle at .*SIGHUP again\n", line), line


def test_sigterm_ends_answers_and_processes(replicas: Running) -> None:
    children = psutil.Process(replicas.process.pid).children(recursive=True)
    assert replicas.end(within_s=60) == 0
    psutil.wait_procs(children, timeout=10)
    assert not [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not any("Traceback" in line for line in replicas.lines)
