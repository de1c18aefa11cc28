"""`mlcpipe serve` with several models: which answer, which are loaded, and what becomes of the others."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import psutil
import pytest

pytest.importorskip("torch", reason="tiny encoders are made by torch")
pytest.importorskip("transformers", reason="tiny encoders are transformers models")

import mlcpipe
from mlcpipe.cli.serve_many import models_of
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.server.app import create_app
from mlcpipe.server.guard import Rules
from mlcpipe.server.load_report import LoadReport
from tests.conftest import QUICK
from tests.models import tiny_encoders
from tests.server.conftest import Running, running_server
from tests.server.model_soak import PROMPTS, TOKENS, chat_body, preparing, soak

if TYPE_CHECKING:
    from tests.conftest import Bundles

CONTEXT = 256
WAIT_S = 120.0  # after which what does not come is a failure


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> mlcpipe.Embedder:
    folder = tmp_path_factory.mktemp("embedder")
    _, checkpoint = tiny_encoders.write("bert", folder / "checkpoint", "mean", normalize=True, num_hidden_layers=2)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")
    return mlcpipe.Embedder(bundle)


@pytest.fixture(scope="module")
def bundles(
    demo_bundles: Bundles, hybrid_bundles: Bundles, tiny_bundles: Bundles, embedder: mlcpipe.Embedder
) -> dict[str, Path]:
    return {
        "demo": demo_bundles["q4f16_1"], "hybrid": hybrid_bundles["q4f16_1"], "tiny": tiny_bundles["q0f32"],
        "words": embedder.path,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(bundles: dict[str, Path], embedder: mlcpipe.Embedder) -> dict[str, dict[str, Any]]:
    """What each model answers, computed without a server."""
    found: dict[str, dict[str, Any]] = {"words": {one: embedder.embed([one])[0].tolist() for one in PROMPTS}}
    for name in ("demo", "hybrid", "tiny"):
        engine = mlcpipe.Engine(bundles[name], context_length=CONTEXT)
        greedy = mlcpipe.SamplingParams(temperature=0)
        found[name] = {
            one: engine.generate(one, sampling=greedy, max_tokens=TOKENS, ignore_eos=True).text for one in PROMPTS
        }
        engine.close()
    return found


def named(bundles: dict[str, Path]) -> list[object]:
    text = [f"{name}={path}" for name, path in bundles.items() if name != "words"]
    return [*text, "--embed", f"words={bundles['words']}"]


def two_fit(bundles: dict[str, Path]) -> int:
    """Bytes for any two of the three models that write text, and the embedder, but not for all: as they are planned."""
    texts = [f"{name}={path}" for name, path in bundles.items() if name != "words"]
    options = ServeOptions(model=texts, embed=[f"words={bundles['words']}"], context=CONTEXT, sequences=1, threads=1)
    rooms = []
    for source in models_of(options, (), ()).sources:
        source.prepare(LoadReport())
        rooms.append(source.room().nbytes)
    least = min(rooms[:3])
    return sum(rooms) - least + least // 2


def wait_until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def server(bundles: dict[str, Path]) -> Iterator[Running]:
    options = ("--memory-bytes", two_fit(bundles), "--context", CONTEXT, "--sequences", 1, "--threads", 1)
    with running_server(*named(bundles), *options) as running:
        yield running
        assert running.end(number=signal.SIGTERM) == 0


@pytest.fixture
def client(server: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=120) as made:
        yield made


def states(client: httpx2.Client) -> dict[str, str]:
    return {one["id"]: one["state"] for one in client.get("/v1/models").json()["data"]}


def test_each_model_answers_as_it_does_alone(client: httpx2.Client, expected: dict[str, dict[str, Any]]) -> None:
    for name in ("demo", "hybrid", "tiny", "demo"):
        answer = client.post("/v1/completions", json=chat_body(name, PROMPTS[1])).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name][PROMPTS[1]])
    vectors = client.post("/v1/embeddings", json={"input": list(PROMPTS)}).json()  # the only one that embeds
    assert vectors["model"] == "words"
    np.testing.assert_array_equal([one["embedding"] for one in vectors["data"]], list(expected["words"].values()))
    found = states(client)
    assert (found["demo"], found["words"]) == ("ready", "ready")
    assert list(found.values()).count("ready") == 3  # the least recently used one has left
    assert found["hybrid"] == "unloaded"


def test_what_is_not_there_or_does_something_else_is_said(client: httpx2.Client) -> None:
    unknown = client.post("/v1/completions", json=chat_body("other", "a"))
    assert unknown.status_code == 404 and "expected demo, hybrid, tiny, words" in unknown.json()["error"]["message"]
    for path, body, words in (
        ("/v1/completions", chat_body("words", "a"), "'words' embeds texts; ask /v1/embeddings"),
        ("/v1/embeddings", {"model": "demo", "input": "a"}, "'demo' writes text; ask /v1/chat/completions"),
        ("/v1/rerank", {"model": "words", "query": "a", "documents": ["b"]}, "ask /v1/embeddings"),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == 400 and words in refused.json()["error"]["message"]
    assert client.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).status_code == 404


def test_ollama_python_lists_loads_and_unloads_them(client: httpx2.Client, server: Running) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as api:
        assert [one.model for one in api.list().models] == [
            "demo:latest",
            "hybrid:latest",
            "tiny:latest",
            "words:latest",
        ]
        assert [one.status for one in api.pull("tiny", stream=True)][-1] == "success"
        assert "tiny:latest" in {one.model for one in api.ps().models} and states(client)["tiny"] == "ready"
        assert api.generate("tiny", keep_alive=0).done_reason == "unload"
        wait_until(lambda: states(client)["tiny"] == "unloaded")
        assert "tiny:latest" not in {one.model for one in api.ps().models}
        assert (
            len(api.embed("words", "a").embeddings) == 1
            and api.generate("tiny", "a", keep_alive="5m", options={"num_predict": 1}).done
        )
        with pytest.raises(ollama.ResponseError, match="writes text"):
            api.embed("demo", "a")
    for what, state in (("load", "loaded"), ("unload", "unloaded")):  # as llama-server's router
        assert client.post(f"/models/{what}", json={"model": "tiny"}).json() == {"success": True}
        wait_until(lambda state=state: client.get("/models/tiny").json()["status"] == {"value": state})
    assert client.post("/models/load", json={"model": "other"}).status_code == 404


CLIENTS = Path(__file__).parent / "node_modules"
UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}


@pytest.mark.full
def test_ollama_s_client_for_javascript(server: Running, expected: dict[str, dict[str, Any]]) -> None:
    """Unmodified: it chats, streams, calls tools, fills schemas, embeds, lists, copies, leaves, and reads refusals."""
    if shutil.which("node") is None or not (CLIENTS / "ollama").is_dir():
        pytest.skip("no packages: npm ci --prefix tests/server")
    tool = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": UNIT}}
    call = 'start: "<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"unit\\": \\"C\\"}}\\n</tool_call>"'
    asked = {
        "url": server.url, "chat": "demo", "embed": "words", "texts": PROMPTS, "prompt": PROMPTS[1], "tool": tool,
        "messages": [{"role": "user", "content": PROMPTS[1]}], "call": call, "schema": UNIT,
        "options": {"temperature": 0, "num_predict": TOKENS, "ignore_eos": True, "deterministic": True},
    }  # fmt: skip
    script = CLIENTS.with_name("ollama_client.mjs")
    done = subprocess.run(["node", script, json.dumps(asked)], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["generated"] == expected["demo"][PROMPTS[1]]
    assert found["whole"] == found["streamed"] != "" and found["counts"][0] == found["counts"][1]
    assert found["done"] == [False] * (len(found["done"]) - 1) + [True]
    assert found["calls"] == [{"index": 0, "name": "weather", "arguments": {"unit": "C"}}] * 2 and found["after"]
    assert json.loads(found["formed"])["unit"] in ("C", "F")
    np.testing.assert_array_equal(found["vectors"], list(expected["words"].values()))
    assert found["vector"] == found["vectors"][0]
    assert found["listed"] == ["demo:latest", "hybrid:latest", "tiny:latest", "words:latest"]
    assert {"demo:latest", "words:latest"} <= {*found["running"]} and found["shown"][0] == "completion"
    assert [found[name] for name in ("pulled", "copied", "deleted")] == ["success"] * 3
    assert tuple(map(int, found["version"].split("."))) >= (0, 6, 4)
    assert found["aborted"] == "AbortError"
    assert found["missing"]["status"] == 404 and "other" in found["missing"]["error"]
    assert found["refused"]["status"] == 400 and "tfs_z" in found["refused"]["error"]


def test_metrics_have_the_name_of_the_model(client: httpx2.Client) -> None:
    for name in ("demo", "tiny"):
        assert client.post("/v1/completions", json=chat_body(name, "a")).status_code == 200
    client.post("/v1/completions", json=chat_body("demo", "a", min_tokens=10**9))
    text = client.get("/metrics").text
    for name in ("demo", "tiny"):
        assert f'mlcpipe_request_success_total{{finished_reason="length",model="{name}"}}' in text
    assert [one["model"] for one in client.get("/health").json()["models"]] == ["demo", "hybrid", "tiny", "words"]
    status = client.get("/status").json()
    assert status["model"] == "demo" and [one["model"] for one in status["models"]] == ["demo", "hybrid", "tiny"]
    other = client.get("/status", params={"model": "tiny"}).json()
    assert other["model"] == "tiny" and other["generated_tokens"] > 0 and not other["sees"]
    assert client.get("/status", params={"model": "nobody"}).status_code == 404


def test_a_stream_is_not_cut_by_a_load_that_needs_its_memory(
    client: httpx2.Client, server: Running, expected: dict[str, dict[str, Any]]
) -> None:
    """All three write at once, though two fit: none is cut, and all are right."""
    client.post("/v1/completions", json=chat_body("demo", "a"))
    with ThreadPoolExecutor(9) as pool:
        names = ["demo", "hybrid", "tiny"] * 3
        bodies = [chat_body(name, PROMPTS[2], max_tokens=40) for name in names]
        found = list(pool.map(lambda body: client.post("/v1/completions", json=body), bodies))
    for name, answer in zip(names, found, strict=True):
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"].startswith(expected[name][PROMPTS[2]])
        assert answer.json()["usage"]["completion_tokens"] == 40


@pytest.mark.full
def test_random_requests_and_cancels_over_models_that_do_not_fit_together(
    client: httpx2.Client, server: Running, expected: dict[str, dict[str, Any]]
) -> None:
    ended = asyncio.run(soak(server.url, expected, 240))
    assert ended["answered"] > 120 and ended["cancelled"] > 5 and not ended["refused"]
    for name in ("demo", "hybrid", "tiny"):
        answer = client.post("/v1/completions", json=chat_body(name, PROMPTS[0])).json()
        assert answer["choices"][0]["text"] == expected[name][PROMPTS[0]]
    assert "failed" not in states(client).values()


@pytest.mark.full
def test_a_preparation_that_is_killed_costs_the_others_nothing(
    demo_bundles: Bundles, tiny_bundles: Bundles, tmp_path: Path
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "new").symlink_to(tiny_bundles.checkpoint)
    (tmp_path / "notes").mkdir()
    (tmp_path / "demo").symlink_to(demo_bundles["q4f16_1"])
    options = ("--models", tmp_path, "--pin", "demo", "--target", QUICK, "--quantization", "q0f32")
    with running_server(*options) as running, httpx2.Client(base_url=running.url, timeout=120) as client:
        assert list(states(client)) == ["demo", "org/new"]
        with pytest.raises(httpx2.ReadTimeout):  # leaves, and the load is given up
            client.post("/v1/completions", json=chat_body("org/new", "a"), timeout=1)
        wait_until(lambda: states(client)["org/new"] == "unloaded" and not preparing(running.process.pid))
        refused: list[Any] = []
        asks = threading.Thread(
            target=lambda: refused.append(client.post("/v1/completions", json=chat_body("org/new", "a")))
        )
        asks.start()
        found: list[psutil.Process] = []
        wait_until(lambda: found.extend(preparing(running.process.pid)) or bool(found))
        try:
            found[0].suspend()
            loading = next(one for one in client.get("/health").json()["models"] if one["model"] == "org/new")
            assert loading["state"] == "loading" and loading["progress"]["stage"]
            assert client.post("/v1/completions", json=chat_body("demo", "a")).status_code == 200
        finally:
            found[0].kill()
        asks.join()
        error = refused[0].json()["error"]
        assert refused[0].status_code == 503 and error["code"] == "load_failed"
        assert "the process that prepares the model was ended; found exit status -9" in error["message"]
        assert client.post("/v1/completions", json=chat_body("demo", "a")).status_code == 200
        assert states(client) == {"demo": "ready", "org/new": "failed"}


def test_a_single_model_leaves_when_idle_and_comes_back(demo_bundles: Bundles) -> None:
    options = (f"demo={demo_bundles['q4f16_1']}", "--ttl", 0)
    with running_server(*options) as running, httpx2.Client(base_url=running.url, timeout=120) as client:
        body = chat_body("demo", PROMPTS[0], stream=True)
        for _ in range(2):
            text = client.post("/v1/completions", json=body).text
            assert json.loads(text.split("data: ")[1].strip())["choices"]
            wait_until(lambda: states(client)["demo"] == "unloaded")
        assert client.get("/status").json()["context_length"] == 2048


def test_a_model_of_the_server_s_folder_is_deleted(demo_bundles: Bundles, tmp_path: Path) -> None:
    folder, bundle = tmp_path / "models", demo_bundles["q4f16_1"]
    shutil.copytree(bundle, folder / "own")
    (folder / "linked").symlink_to(bundle)

    async def deleted() -> list[int]:
        loaded = models_of(ServeOptions(models=folder), (), ())
        app, guard = create_app(Rules(keys=["k"]), serves="all")
        app.state.pool = pool = loaded.pool()
        transport, headers = httpx2.ASGITransport(app=guard), {"authorization": "Bearer k"}
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
            names = ("own:latest", "own", "linked")
            found = [await client.request("DELETE", "/api/delete", json={"model": name}) for name in names]
            assert [one["model"] for one in (await client.get("/api/tags")).json()["models"]] == ["linked:latest"]
            assert "not the server's own" in found[-1].json()["error"]
        pool.close()
        return [one.status_code for one in found]

    assert asyncio.run(deleted()) == [200, 404, 400]
    assert [path.name for path in folder.iterdir()] == ["linked"] and (bundle / "mlcpipe.json").is_file()
