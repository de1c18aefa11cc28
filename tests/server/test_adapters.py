"""Adapters that requests choose by name, loaded and unloaded while the server answers."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch", reason="the adapters are written with the shapes of a transformers model")
transformers = pytest.importorskip("transformers", reason="the adapters are written for a transformers model")

import mlcpipe
from tests.conftest import DEMO, QUICK
from tests.models.adapter_files import config, random_pairs, write_adapter
from tests.server.conftest import Running, running_server

pytestmark = pytest.mark.full
KEY = {"Authorization": "Bearer secret"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "Once upon a time, there was a compiler."
RANKS = {"first": 8, "second": 16, "third": 40}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("adapted") / "bundle"
    return mlcpipe.compile(DEMO, target=QUICK, quantization="q4f16_1", output=output, adapters=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(DEMO))
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(folder / name, random_pairs(model, rank, seed), config(rank))
        for seed, (name, rank) in enumerate(RANKS.items())
    }


@pytest.fixture(scope="module")
def server(bundle: Path, folders: dict[str, Path]) -> Iterator[Running]:
    """With room for four blocks of 16 ranks, of which two are taken."""
    options = [f"--adapter={name}={folders[name]}" for name in ("first", "second")]
    with running_server(
        bundle,
        "--name",
        "demo",
        "--threads",
        1,
        "--api-key",
        "secret",
        "--api-key",
        "other",
        *options,
        "--adapter-ranks",
        64,
    ) as running:
        yield running


def post(server: Running, path: str, **body: Any) -> Any:
    return httpx2.post(server.url + path, json=body, headers=KEY, timeout=120)


def answer(server: Running, model: str, prompt: str = PROMPT) -> tuple[str, str]:
    """The greedy answer of a model, and who the server says it is."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "deterministic": True}
    found = post(server, "/v1/completions", model=model, **body)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"], found.json()["model"]


def test_names_choose_and_answers_are_those_of_an_engine(
    server: Running, bundle: Path, folders: dict[str, Path]
) -> None:
    listed = httpx2.get(server.url + "/v1/models", headers=KEY).json()["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [("demo", None), ("first", "demo"), ("second", "demo")]
    found = {name: answer(server, name) for name in ("demo", "first", "second")}
    assert len({text for text, _ in found.values()}) == 3 and [one for _, one in found.values()] == list(found)
    for name in found:
        engine = mlcpipe.Engine(bundle, adapter=folders.get(name))
        sampling = mlcpipe.SamplingParams(temperature=0)
        alone = engine.generate(PROMPT, sampling=sampling, max_tokens=24, ignore_eos=True)
        assert alone.text == found[name][0]


def test_together_as_alone(server: Running) -> None:
    """Also where prompts begin alike, so that pages of another adapter would be found."""
    names = ["demo", "first", "second"] * 4
    alone = {name: answer(server, name)[0] for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: answer(server, name)[0], names)) == [alone[name] for name in names]


def test_requests_choose_a_scale(server: Running, bundle: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """As llama-server's `lora` and `/lora-adapters`: an adapter with half of `lora_alpha` says the same."""
    half = tmp_path / "half"
    shutil.copytree(folders["first"], half)
    (half / "adapter_config.json").write_text(json.dumps(config(RANKS["first"], lora_alpha=RANKS["first"])))
    engine = mlcpipe.Engine(bundle, adapter=half)
    greedy = mlcpipe.SamplingParams(temperature=0)
    expected = engine.generate(PROMPT, sampling=greedy, max_tokens=24, ignore_eos=True).text
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "deterministic": True}

    def said(path: str = "/v1/completions", **more: Any) -> str:
        found = post(server, path, **body, **more).json()
        return str(found["content"] if path == "/completion" else found["choices"][0]["text"])

    def default(*scales: float) -> Any:
        given = [{"id": index, "scale": scale} for index, scale in enumerate(scales)]
        return httpx2.post(server.url + "/lora-adapters", json=given, headers=KEY)

    names = [one["path"] for one in httpx2.get(server.url + "/lora-adapters", headers=KEY).json()]
    first, whole = names.index("first"), {name: answer(server, name)[0] for name in ("demo", "first")}
    assert said(lora=[{"id": first, "scale": 0.5}]) == expected not in whole.values()
    assert said("/completion", lora=[{"id": first, "scale": 0.5}]) == expected
    assert said(lora=[{"id": first, "scale": 1}]) == whole["first"]
    assert said(lora=[{"id": first, "scale": 0}]) == said(lora=[]) == whole["demo"]
    for scale in (0.25, 0.75, 1.5, 0.5):  # more than there is room for: those that nobody uses leave
        text = said(lora=[{"id": first, "scale": scale}])
    assert text == expected
    assert default(*(0.5 * (index == first) for index in range(len(names)))).json() == {"success": True}
    assert said() == expected and said(lora=[]) == whole["demo"] and answer(server, "first")[0] == whole["first"]
    listed = httpx2.get(server.url + "/lora-adapters", headers=KEY).json()
    assert [(one["id"], one["scale"]) for one in listed] == [(i, 0.5 * (i == first)) for i in range(len(names))]
    other = {"authorization": "Bearer other"}
    assert {one["scale"] for one in httpx2.get(server.url + "/lora-adapters", headers=other).json()} == {0}
    theirs = httpx2.post(server.url + "/v1/completions", json=body, headers=other, timeout=120).json()
    assert theirs["choices"][0]["text"] == whole["demo"]  # what one key sets changes no answer of another
    assert default(1, 1).status_code == default(1, 0, 0, 0).status_code == 400 and said() == expected
    assert default().status_code == 200 and said() == whole["demo"]
    for wrong in ([{"id": 0, "scale": 1}, {"id": 1, "scale": 1}], [{"id": 0, "scale": 1}] * 2, [{"id": 9, "scale": 1}]):
        assert post(server, "/v1/completions", **body, lora=wrong).status_code == 400
    both = post(server, "/v1/completions", **body, lora=[{"id": first, "scale": 1}], model="first")
    assert both.status_code == 400 and "lora" in both.json()["error"]["message"]


def test_load_and_unload(server: Running, folders: dict[str, Path]) -> None:
    path = str(folders["third"])
    full = post(server, LOAD, lora_name="third", lora_path=path)
    assert (full.status_code, full.json()["error"]["code"]) == (503, "out_of_memory")
    gone = answer(server, "second")[0]
    assert post(server, UNLOAD, lora_name="second").text == "Success: LoRA adapter 'second' removed successfully."
    assert post(server, "/v1/completions", model="second", prompt="a").status_code == 404
    assert post(server, UNLOAD, lora_name="second").status_code == 404
    loaded = post(server, LOAD, lora_name="third", lora_path=path)
    assert loaded.text == "Success: LoRA adapter 'third' added successfully."
    assert post(server, LOAD, lora_name="third", lora_path=path).status_code == 400
    third = answer(server, "third")[0]
    assert third not in (gone, answer(server, "demo")[0])
    assert post(server, UNLOAD, lora_name="third").status_code == 200
    # The same name again, with other weights in the same place: nothing of the one before is reused.
    assert post(server, LOAD, lora_name="third", lora_path=str(folders["second"])).status_code == 200
    assert answer(server, "third")[0] == gone
    assert post(server, UNLOAD, lora_name="third").status_code == 200
    assert post(server, LOAD, lora_name="second", lora_path=str(folders["second"])).status_code == 200


def test_an_adapter_that_is_unloaded_ends_what_it_began(server: Running, folders: dict[str, Path]) -> None:
    """Whenever that comes: between a request's first check and its start too, the model does not answer for it."""
    expected = answer(server, "second")[0]
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "deterministic": True}
    answered = 0
    with ThreadPoolExecutor(4) as pool:
        for pause_ms in (0, 1, 2, 3, 5, 7, 10, 15, 20, 30) * 4:
            running = [pool.submit(post, server, "/v1/completions", model="second", **body) for _ in range(4)]
            time.sleep(pause_ms / 1000)
            assert post(server, UNLOAD, lora_name="second").status_code == 200
            found = [one.result() for one in running]
            assert {one.status_code for one in found} <= {200, 400, 404}
            texts = [one.json()["choices"][0]["text"] for one in found if one.status_code == 200]
            assert texts == [expected] * len(texts)
            answered += len(texts)
            assert post(server, LOAD, lora_name="second", lora_path=str(folders["second"])).status_code == 200
    assert answered
    assert answer(server, "second")[0] == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "demo", "lora_path": "."}, "already"),
        ({"lora_name": "first", "lora_path": "."}, "already"),
        ({"lora_name": "", "lora_path": "."}, "lora_name"),
        ({"lora_name": "*", "lora_path": "."}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "lora_path: expected the folder of an adapter"),
        ({"lora_name": "x", "lora_path": str(DEMO)}, "lora_path: expected the folder of an adapter"),
    ],
)
def test_what_cannot_be_loaded(server: Running, body: dict[str, str], message: str) -> None:
    refused = post(server, LOAD, **body)
    assert refused.status_code == 400 and message in refused.json()["error"]["message"]


def test_only_clients_with_a_key_load_adapters(server: Running, bundle: Path) -> None:
    body = {"lora_name": "x", "lora_path": "."}
    assert httpx2.post(server.url + LOAD, json=body).status_code == 401
    with running_server(bundle, "--threads", 1, "--sequences", 1) as open_:
        assert httpx2.post(open_.url + LOAD, json=body).status_code == 403


def test_prompts_of_adapters_are_not_saved(bundle: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    option = f"--adapter=first={folders['first']}"
    with running_server(bundle, "--threads", 1, "--sequences", 1, "--prefixes", tmp_path, option) as running:
        refused = post(running, "/v1/kv/save", name="a", model="first", prompt="Once upon a time " * 10)
        assert refused.status_code == 400 and "not saved" in refused.text
