"""All that a server can do at once: each answer is what a server that does nothing beside it gives."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch", reason="tiny models are made by torch")
transformers = pytest.importorskip("transformers", reason="tiny models are transformers models")
pytestmark = pytest.mark.everything

import mlcpipe
from tests.conftest import DEMO, QUICK
from tests.models import tiny_encoders as tiny
from tests.models.adapter_files import config, random_pairs, write_adapter
from tests.server.conftest import Running, running_server

REQUESTS, KINDS, AT_ONCE, CONTEXT = 3000, 60, 16, 512
MAX_GROWTH = 32 << 20  # bytes; what leaks with each of 2000 requests shows
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "ab", "schema": SCHEMA}}
TEXT = "A compiler turns a model into a program for one device, and runs it there. " * 4


def kind(number: int) -> dict[str, Any]:
    """One of the requests: long or short, drawn or greedy, with an adapter, a schema, several answers, a prediction."""
    draw = random.Random(number)
    long = TEXT * draw.choice([0, 0, 1, 2, 12])  # the last one is longer than the context
    body: dict[str, Any] = {
        "model": draw.choice(["demo", "demo", "first", "second"]),
        "messages": [{"role": "user", "content": f"{long}What is mlcpipe? {number}"}],
        "max_tokens": draw.choice([1, 8, 40, 120]),
        "temperature": draw.choice([0, 0, 0.7, 1.0]),
        "seed": number,
        "deterministic": True,
    }
    more: list[dict[str, Any]] = [
        {}, {}, {"n": 3}, {"response_format": FORMAT}, {"ignore_eos": True, "max_tokens": 300},
        {"prediction": {"type": "content", "content": "mlcpipe turns a language model checkpoint into a program."}},
    ]  # fmt: skip
    return body | draw.choice(more)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlcpipe.compile(
        DEMO, target=QUICK, quantization="q4f16_1", output=tmp_path_factory.mktemp("model") / "m", adapters=True
    )


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """What both servers have, as it changes answers."""
    folder = tmp_path_factory.mktemp("adapters")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(DEMO))
    adapters = [
        f"--adapter={name}={write_adapter(folder / name, random_pairs(model, 8, seed), config(8))}"
        for seed, name in enumerate(("first", "second"))
    ]
    return [*adapters, "--name", "demo", "--context", CONTEXT, "--context-shift", "--threads", 2]


@pytest.fixture(scope="module")
def alone(bundle: Path, options: list[object]) -> list[list[str]]:
    """The answers of each kind, one after the other."""
    with (
        running_server(bundle, *options, "--draft", "off") as running,
        httpx2.Client(base_url=running.url, timeout=120) as client,
    ):
        return [texts(client.post("/v1/chat/completions", json=kind(number))) for number in range(KINDS)]


def texts(answer: httpx2.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def busy(bundle: Path, options: list[object], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("busy")
    _, checkpoint = tiny.write("bert", folder / "checkpoint", "mean", normalize=True, num_hidden_layers=2)
    encoder = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "encoder")
    own = (
        "--draft-model",
        bundle,
        "--semantic-cache",
        encoder,
        "--semantic-threshold",
        0.9999,
        "--semantic-entries",
        9,
    )
    with running_server(
        bundle, *options, *own, "--prefixes", folder / "prefixes", "--sequences", 2, "--max-queue", 256, life_s=3600
    ) as running:
        yield running


async def ask(client: httpx2.AsyncClient, number: int, alone: list[list[str]]) -> str:
    """One of the kinds, whole or streamed or left; or a prompt that is saved, or restored."""
    draw = random.Random(number)
    which = draw.randrange(KINDS)
    body, way = kind(which), draw.random()
    if way < 0.05:
        await client.post("/v1/kv/save", json={"name": str(which % 5), "messages": body["messages"]})
        restored = await client.post("/v1/kv/restore", json={"name": str(draw.randrange(5))})
        assert restored.status_code in (200, 400, 404, 503), restored.text
        return "saved" if restored.status_code == 200 else "refused"
    if way < 0.25:
        async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            async for line in stream.aiter_lines():
                if '"content":"' in line and draw.random() < 0.2:
                    return "left"
        return "read"
    answer = await client.post("/v1/chat/completions", json=body)
    assert texts(answer) == alone[which], f"{which}: {json.dumps(body)}"
    return "kept" if answer.headers.get("x-cache") == "hit" else "computed"


async def several(url: str, numbers: range, alone: list[list[str]]) -> Counter[str]:
    """So many requests, `AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx2.AsyncClient, number: int) -> str:
        async with places:
            return await ask(client, number, alone)

    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=httpx2.Limits(max_connections=AT_ONCE)) as client:
        return Counter(await asyncio.gather(*(one(client, number) for number in numbers)))


def test_each_answer_is_that_of_a_server_alone(busy: Running, alone: list[list[str]]) -> None:
    """And nothing is left behind: no page in use, no memory."""
    process, third = psutil.Process(busy.process.pid), REQUESTS // 3
    asyncio.run(several(busy.url, range(third), alone))
    before = process.memory_info().rss
    ended = asyncio.run(several(busy.url, range(third, REQUESTS), alone))
    grown = process.memory_info().rss - before
    with httpx2.Client(base_url=busy.url, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=kind(0)).status_code == 200
        facts, metrics = client.get("/status").json(), client.get("/metrics").text
    found = {
        name: float(value) for name, value in (line.split(" ") for line in metrics.splitlines() if line[:1] != "#")
    }
    assert min(ended[how] for how in ("computed", "kept", "left", "read", "saved")) > 10
    assert (facts["running"], facts["waiting"], found["mlcpipe_kv_cache_usage_perc"]) == (0, 0, 0)
    for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens"):
        assert found[f"mlcpipe_{name}_total"] > 0, name
    assert facts["finished"].get("error", 0) == 0 and not any("Traceback" in line for line in busy.lines)
    assert grown < MAX_GROWTH
