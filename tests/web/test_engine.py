"""The chat page in headless Chromium with its real engine, on the demo model compiled for WebGPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.web import Site, assemble_site
from tests.conftest import DEMO
from tests.web.conftest import ROOT, Browser, Run, scenario

FILE = "engine_scenarios.mjs"
QUESTION = "What is a compiler?"
QUANTIZATION = "q4f32_1"


@pytest.fixture(scope="module")
def web_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for any GPU."""
    given = request.config.getoption("--web-bundle", default=None)  # unknown where pytest starts above this folder
    if given is not None:
        return Path(given)
    request.getfixturevalue("wasm_runtime")
    folder = tmp_path_factory.mktemp("web") / "demo"
    return mlcpipe.compile(DEMO, target="webgpu", quantization=QUANTIZATION, output=folder, quick=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A question, and what the Python engine answers on the CPU with the same weights and exact activations."""
    folder = tmp_path_factory.mktemp("cpu")
    target = folder / "exact.toml"
    target.write_text('description = "no int8 activations"\nbase = "cpu-native"\n[schedule]\nint8_activations = 0\n')
    bundle = mlcpipe.compile(DEMO, target=str(target), quantization=QUANTIZATION, output=folder / "bundle")
    sampling = mlcpipe.SamplingParams(temperature=0)
    answer = mlcpipe.Engine(bundle, threads=1).chat(
        [{"role": "user", "content": QUESTION}], sampling=sampling, max_tokens=24
    )
    return {"question": QUESTION, "answer": answer.text.strip()}


@pytest.fixture
def chat_web(real_page: Path, wasm_runtime: None) -> Iterator[str]:
    """The address that `mlcpipe chat --web` says, with nothing else on the command line."""
    command = [sys.executable, "-m", "mlcpipe", "chat", "--web", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.match(r"(http://127\.0\.0\.1:\d+/)  \(Ctrl-C", line):
                yield found[1]
                break
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 130, lines


def test_answers_as_the_python_engine(run: Run, real_page: Path, web_bundle: Path, expected: dict[str, str]) -> None:
    site = assemble_site(real_page, [web_bundle], title="Demo model")
    run(FILE, "answers_as_the_python_engine_and_works_offline", site, expected=expected)


def test_chat_web(browser: Browser, chat_web: str) -> None:
    scenario(browser, FILE, "stops_and_recovers_from_a_lost_gpu", chat_web, question=QUESTION)


def test_readme_example(run: Run, packages: Path, web_bundle: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """The lines of the README on a page of their own, with the packages that npm installed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```html\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) <= 11
    site = assemble_site(tmp_path, [web_bundle], title="Demo model")
    address = f"/models/{web_bundle.name}/"
    example = example.replace('"https://my.host/site/models/bundle/"', f'location.origin + "{address}"')
    assert address in example and QUESTION in example
    modules = {"@mlc-ai/web-llm": "/web-llm.mjs", "loglevel": "/loglevel.mjs", "url": "/empty.mjs"}
    head = f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
    loglevel = (packages / "node_modules/loglevel/dist/loglevel.js").read_text(encoding="utf-8")
    files: dict[str, Path | bytes] = {
        **site.files,
        "plain.html": f"<!doctype html><html><head>{head}</head><body></body>{example}</html>".encode(),
        "web-llm.mjs": packages / "node_modules/@mlc-ai/web-llm/lib/index.js",
        "loglevel.mjs": f"const module = {{exports: {{}}}};\n{loglevel}\nexport default module.exports;".encode(),
        "empty.mjs": b"export default {};",
    }
    run(FILE, "readme_example_runs_in_plain_webllm", Site(files), expected=expected)
