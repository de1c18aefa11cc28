"""Random requests to a server of several models, with cancels: what is answered is compared with what each answers alone.

By hand, over four random models of which two fit, one prepared again from its checkpoint and killed while that runs:
`python -m tests.server.model_soak REQUESTS [SEED]`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil

PROMPTS = ("Hello", "What is a compiler?", "1 2 3 4 5 6")
TOKENS = 6
KILLED = "the process that prepares the model was ended; found exit status -9"


def chat_body(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request with one answer."""
    return {
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "deterministic": True, **fields,
    }  # fmt: skip


def preparing(server: int) -> list[psutil.Process]:
    """The processes of a server that prepare models."""
    found = []
    for one in psutil.Process(server).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has just ended
            if "mlcpipe.server.preparing" in one.cmdline():  # of a zombie it is empty
                found.append(one)
    return found


async def soak(
    url: str,
    expected: Mapping[str, Mapping[str, Any]],
    requests: int,
    *,
    clients: int = 8,
    seed: int = 0,
    kills: Callable[[], int] | None = None,
    each: Callable[[Mapping[str, Any]], None] | None = None,
) -> Counter[str]:
    """Send `requests`, a fifth of which leave early -> what became of them.

    `expected`: model -> prompt -> text, or the embedding. `kills` is called all the time, ends preparations and returns
    how many; only with it a load may fail, in words. `each` gets `/health` from time to time. Raises AssertionError for
    any other answer.
    """
    draw, ended = random.Random(seed), Counter[str]()
    left = iter(range(requests))

    async def one(client: httpx2.AsyncClient) -> None:
        model = draw.choice(list(expected))
        prompt, stream = draw.choice(PROMPTS), draw.random() < 0.4
        right = expected[model][prompt]
        if isinstance(right, list):
            path, body, stream = "/v1/embeddings", {"model": model, "input": prompt}, False
        else:
            path, body = "/v1/completions", chat_body(model, prompt, stream=stream)
        work = asyncio.ensure_future(client.post(path, json=body))
        if draw.random() < 0.2:
            await asyncio.wait({work}, timeout=draw.random() * 0.2)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                ended["cancelled"] += 1
                return
        answer = await work
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code == 503 and answer.headers["retry-after"], error
            if kills is not None and error["code"] == "load_failed" and KILLED in error["message"]:
                ended["failed"] += 1
                return
            assert error["code"] == "overloaded", error
            ended["refused"] += 1
            return
        if isinstance(right, list):
            found: Any = answer.json()["data"][0]["embedding"]
        elif stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]", answer.text
            found = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
        else:
            found = answer.json()["choices"][0]["text"]
        assert found == right, (model, prompt, found, right)
        ended["answered"] += 1

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300) as made:
            for _ in left:
                await one(made)

    async with _beside(url, ended, kills, each):
        await asyncio.gather(*(client() for _ in range(clients)))
    return ended


@asynccontextmanager
async def _beside(
    url: str,
    ended: Counter[str],
    kills: Callable[[], int] | None,
    each: Callable[[Mapping[str, Any]], None] | None,
) -> AsyncIterator[None]:
    """Kills, and looks at the server, until the end of the block, which their errors end."""

    async def look() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300) as client:
            while True:
                if kills is not None:
                    ended["kills"] += kills()
                if each is not None:
                    each((await client.get("/health")).json())
                await asyncio.sleep(0.2)

    looking, sending = asyncio.ensure_future(look()), asyncio.current_task()
    assert sending is not None
    looking.add_done_callback(lambda one: one.cancelled() or sending.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if looking.done():
            looking.result()
        raise
    finally:
        looking.cancel()
        await asyncio.wait({looking})


def alone(url: str) -> dict[str, dict[str, Any]]:
    """What each model of a server answers, one after the other."""
    with httpx2.Client(base_url=url, timeout=300) as client:
        answers: dict[str, dict[str, Any]] = {}
        for listed in client.get("/v1/models").json()["data"]:
            model, own = listed["id"], {}
            for prompt in PROMPTS:
                answer = client.post("/v1/completions", json=chat_body(model, prompt))
                if answer.status_code == 200:
                    own[prompt] = answer.json()["choices"][0]["text"]
                    continue
                answer = client.post("/v1/embeddings", json={"model": model, "input": prompt})
                if answer.status_code == 200:
                    own[prompt] = answer.json()["data"][0]["embedding"]
            if own:
                answers[model] = own
        return answers


class _Watched:
    """Of a server with a model that is prepared again and again: what it takes, and what is done to it."""

    def __init__(self, server: int, made: Path, rooms: Mapping[str, int], most: int, seed: int) -> None:
        self._server, self._made, self._rooms, self._most = psutil.Process(server), made, rooms, most
        self._draw = random.Random(seed)
        self.resident: list[int] = []  # bytes
        self.removed = self.planned = 0

    def kills(self) -> int:
        """End what is being prepared, one time in 25; make the next load prepare again where the model is not loading."""
        killed = 0
        for one in preparing(self._server.pid):
            if self._draw.random() < 0.04:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
                    killed += 1
        return killed

    def look(self, health: Mapping[str, Any]) -> None:
        """Check the plan, and note the memory."""
        states = {one["model"]: one["state"] for one in health["models"]}
        planned = sum(self._rooms[name] for name, state in states.items() if state in ("ready", "unloading"))
        assert planned <= self._most, (states, planned, self._most)
        self.planned = max(self.planned, planned)
        self.resident.append(self._server.memory_info().rss)
        if states["d"] == "ready" and self._draw.random() < 0.3:
            for bundle in self._made.iterdir():  # it is mapped: only the next load misses it
                bundle.rename(self._made.parent / f"gone{self.removed}")
                self.removed += 1


def _run(requests: int, seed: int) -> None:
    """Make the models, serve them, and print a summary. Raises AssertionError for what is wrong."""
    import mlcpipe
    from mlcpipe.cli.serve_many import models_of
    from mlcpipe.cli.serve_options import ServeOptions
    from mlcpipe.server.load_report import LoadReport
    from mlcpipe.server.model_pool import RETRY_S
    from tests.conftest import QUICK, TinyLlama, write_llama
    from tests.server.conftest import running_server

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["MLCPIPE_CACHE"] = str(folder / "cache")
        checkpoints = [
            write_llama(folder / one, TinyLlama(seed=at, layers=2 + at)) for at, one in enumerate(("a", "b", "c", "d"))
        ]
        choices = {"target": QUICK, "quantization": "q0f32"}
        bundles = [mlcpipe.compile(one, output=folder / f"{one.name}-bundle", **choices) for one in checkpoints]
        planned = ServeOptions(model=list(map(str, bundles)), context=128, sequences=2, threads=1)
        rooms = {}
        for source, checkpoint in zip(models_of(planned, (), ()).sources, checkpoints):
            source.prepare(LoadReport())
            rooms[checkpoint.name] = source.room().nbytes
        most = sum(sorted(rooms.values())[-2:])
        named = [f"{one.name}={path}" for one, path in zip(checkpoints, [*bundles[:3], checkpoints[3]])]
        options = ("--memory-bytes", most, "--context", 128, "--sequences", 2, "--threads", 1)
        targets = [word for key, value in choices.items() for word in (f"--{key}", value)]
        with running_server(*named, *options, *targets, life_s=24 * 3600) as server:
            expected = alone(server.url)
            assert expected.keys() == rooms.keys()
            watched = _Watched(server.process.pid, folder / "cache" / "bundles", rooms, most, seed)
            began = time.monotonic()
            ended = asyncio.run(soak(server.url, expected, requests, seed=seed, kills=watched.kills, each=watched.look))
            took_s = time.monotonic() - began
            time.sleep(RETRY_S + 2)  # a model that failed to load is refused so long
            assert alone(server.url) == expected
            assert server.end() == 0
        quarter = max(1, len(watched.resident) // 4)
        first, last = max(watched.resident[:quarter]), max(watched.resident[-quarter:])
        assert last <= first + (32 << 20), (first, last)
        sys.stdout.write(f"{requests} requests in {took_s:.0f} s: {dict(ended)}\n")
        sys.stdout.write(
            f"prepared again {watched.removed} times; planned at most {watched.planned:,} of {most:,} bytes\n"
        )
        sys.stdout.write(
            f"resident at most {first / 1e6:.0f} MB in the first quarter, {last / 1e6:.0f} MB in the last\n"
        )


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
