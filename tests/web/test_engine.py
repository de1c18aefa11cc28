"""The chat page in headless Chromium with its real engine, on the demo model compiled for WebGPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.web import assemble_site, page_folder
from tests.conftest import DEMO
from tests.web.conftest import Run, need

FILE = "engine_scenarios.mjs"
NAMES = ("answers_as_the_python_engine_and_works_offline", "stops_and_recovers_from_a_lost_gpu")
QUESTION = "What is a compiler?"
QUANTIZATION = "q4f32_1"


@pytest.fixture(scope="module")
def web_bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model for any GPU."""
    given = request.config.getoption("--web-bundle")
    if given is not None:
        return Path(given)
    need("emcc")
    folder = tmp_path_factory.mktemp("web") / "demo"
    return mlcpipe.compile(DEMO, target="webgpu", quantization=QUANTIZATION, output=folder)


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


@pytest.mark.parametrize("name", NAMES)
def test_engine(name: str, run: Run, packages: Path, web_bundle: Path, expected: dict[str, str]) -> None:
    site = assemble_site(page_folder(), [web_bundle], title="Demo model")
    run(FILE, name, site, expected=expected)
