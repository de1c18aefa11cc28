"""A browser for the chat page: the page is built once, one Chromium serves all scenarios, each in a fresh profile."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.web import Site, assemble_site, page_folder
from tests.e2e.web.faulty_server import FaultyServer
from tests.once import Once
from tests.page_build import alone, built_once, installed_packages  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
Run = Callable[..., None]
Browser = Callable[[dict[str, Any]], dict[str, Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--web-bundle`: try the page with a bundle at hand."""
    parser.addoption(
        "--web-bundle", default=None, help="a bundle of the demo model for webgpu, instead of compiling one"
    )


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(scope="session")
def real_page(packages: Path) -> Path:
    """The page as it ships."""
    with alone():
        return page_folder()


@pytest.fixture(scope="session")
def scripted_page(packages: Path, once: Once) -> Path:
    """The page with an engine that answers from a script."""
    return built_once(once, "build:scripted", packages / "dist-test")


@pytest.fixture(scope="session")
def browser(packages: Path) -> Iterator[Browser]:
    """Runs a scenario in headless Chromium -> what came of it."""
    need("chromium")
    command = ["node", str(HERE / "driver.mjs"), str(packages), shutil.which("chromium") or ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin is not None and driver.stdout is not None

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            driver.stdin.write(json.dumps(request) + "\n")
            driver.stdin.flush()
            answer: dict[str, Any] = json.loads(driver.stdout.readline())
            return answer

        yield ask
        driver.stdin.close()
        driver.wait(timeout=30)


def scenario(browser: Browser, file: str, name: str, url: str, **more: object) -> None:
    """Run one scenario of a file on the page at `url`; it gets the rest, too."""
    result = browser({"file": str(HERE / file), "name": name, "url": url, "more": more})
    text = "\n".join([result.get("error", ""), *result.get("log", []), result.get("page", "")])
    assert result["ok"], text


@pytest.fixture
def run(browser: Browser) -> Run:
    """`run(file, name, site, ...)`: serve the site and run one scenario of the file on it; it gets the rest, too."""

    def go(file: str, name: str, site: Site, **more: object) -> None:
        with FaultyServer(site) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                scenario(browser, file, name, server.url, **more)
            finally:
                server.shutdown()
                thread.join(timeout=10)

    return go


def write_fake_bundle(folder: Path, features: list[str], seed: int, *, companion: bool = False) -> Path:
    """The files of a webgpu bundle, of random bytes: enough for a page whose engine is a script.

    With a companion there is a library for GPUs with float16, too, for the same weights.
    """
    rng = np.random.default_rng(seed)
    contents = {
        "lib/model.wasm": rng.bytes(60_000),
        "mlc-chat-config.json": b"{}",
        "tokenizer.json": b"{}",
        "tensor-cache.json": b'{"metadata": {"ParamSize": 0, "ParamBytes": 0, "BitsPerParam": 4}, "records": []}',
        "params_shard_0.bin": rng.bytes(1_200_000),
    }
    if companion:
        contents["lib/model-f16.wasm"] = rng.bytes(50_000)
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = {n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in contents.items()}
    (folder / "mlcpipe.json").write_text(json.dumps(fake_manifest(features, files, companion=companion)))
    return folder


def fake_states(dim: int) -> list[dict[str, Any]]:
    """Keys and values of four layers with two KV heads: 64 bytes of a token for each of `dim`."""
    parts = [{"name": name, "dtype": "float32", "shape": [16, dim], "token_axis": 0} for name in ("keys", "values")]
    return [
        {"name": f"layers.{i}.attention", "kind": "pages", "copies": 1, "parts": parts, "layers": [i]} for i in range(4)
    ]


def fake_variants(features: list[str], *, companion: bool) -> list[dict[str, Any]]:
    """The variants of a target: one, or two libraries, best first."""
    plain = {"name": "webgpu", "features": features, "tvm_target": '{"kind": "webgpu"}', "bytes": 60_000}
    if not companion:
        return [plain]
    plan = {"weights_bytes": 1_200_000, "workspace_bytes": {"prefill": 4_000_000}}
    half = {
        "path": "lib/model-f16.wasm",
        "dtype": "float16",
        "kv_dtype": "float16",
        "memory_plan": plan,
        "states": fake_states(64),
    }
    whole = {
        "path": "lib/model.wasm",
        "dtype": "float32",
        "kv_dtype": "float32",
        "memory_plan": plan,
        "states": fake_states(64),
    }
    first = {
        "name": "webgpu-f16",
        "features": ["shader-f16"],
        "tvm_target": '{"kind": "webgpu"}',
        "bytes": 50_000,
        "library": half,
    }
    return [first, plain | {"library": whole}]


def fake_manifest(features: list[str], files: dict[str, Any], *, companion: bool = False) -> dict[str, Any]:
    """A manifest of a model of 1.2 MB with 4096 tokens of context."""
    variants = fake_variants(features, companion=companion)
    return {
        "format_version": 4,
        "mlcpipe_version": "0.1.0",
        "abi": "0",
        "target": {"name": "webgpu", "triple": "wasm32-unknown-unknown-wasm", "variants": variants},
        "model": {
            "model_type": "llama",
            "vocab_size": 3072,
            "hidden_size": 256,
            "num_layers": 4,
            "context_length": 4096,
            "dtype": "float32",
            "kv_dtype": "float32",
            "prefill_chunk": 512,
            "max_batch": 64,
            "recompute_above": None,
        },
        "quantization": "q4f32_1",
        "weight_layout": "row",
        "entry_points": ["embed"],
        "params": [{"name": "w", "shape": [3072, 256], "dtype": "float32", "sources": ["w"]}],
        "memory_plan": {
            "weights_bytes": 1_200_000,
            "workspace_bytes": {"prefill": 8_000_000},
        },
        "states": fake_states(128),
        "kernels": [],
        "linker": {"name": "none", "version": "0"},
        "checkpoint_hash": "0",
        "created": "2026-11-21T00:00:00+00:00",
        "files": files,
    }


@pytest.fixture(scope="session")
def scripted_site(scripted_page: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The scripted page with a small model that has a library for float16, too."""
    bundle = write_fake_bundle(tmp_path_factory.mktemp("bundles") / "tiny", [], seed=2, companion=True)
    return assemble_site(scripted_page, [bundle], title="Tiny model")
