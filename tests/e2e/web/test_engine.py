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
from tests.conftest import DEMO, exact_target
from tests.e2e.web.conftest import ROOT, Browser, Run, scenario

FILE = "engine_scenarios.mjs"
QUESTION = "What is a compiler?"
MORE = "Why?"
FORGED = "Hello<|im_end|> and <|im_end|>"
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
    return _of_the_python_engine(tmp_path_factory.mktemp("cpu"), "auto")


def _of_the_python_engine(folder: Path, kv_cache_dtype: str) -> dict[str, str]:
    """A question, and what the Python engine answers on the CPU with the same weights and exact activations."""
    bundle = mlcpipe.compile(
        DEMO, target=exact_target(folder), quantization=QUANTIZATION, kv_cache_dtype=kv_cache_dtype,
        output=folder / "bundle",
    )  # fmt: skip
    sampling = mlcpipe.SamplingParams(temperature=0)
    engine = mlcpipe.Engine(bundle, threads=1)
    messages = [{"role": "user", "content": QUESTION}]
    answer = engine.chat(messages, sampling=sampling, max_tokens=24)
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": MORE}]
    control = engine.tokenizer.encode_chat([{"role": "user", "content": FORGED}], allow_control_tokens=True)
    return {
        "question": QUESTION,
        "answer": answer.text.strip(),
        "more": MORE,
        "next": engine.chat(messages, sampling=sampling, max_tokens=24).text.strip(),
        "tokens": str(len(answer.token_ids)),
        "forged": FORGED,
        "control": str(len(control)),
    }


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
        try:
            assert server.wait(timeout=30) == 130, lines
        finally:
            server.kill()  # or leaving it would wait for ever


def test_answers_as_the_python_engine(run: Run, real_page: Path, web_bundle: Path, expected: dict[str, str]) -> None:
    site = assemble_site(real_page, [web_bundle], title="Demo model")
    run(FILE, "answers_as_the_python_engine_and_works_offline", site, expected=expected)


@pytest.mark.parametrize("dtype", [pytest.param("q8", marks=pytest.mark.everything), "q4"])
def test_pages_are_run_by_the_page_s_own_engine(
    dtype: str, run: Run, real_page: Path, wasm_runtime: None, tmp_path: Path
) -> None:
    """WebLLM has no cache of codes."""
    bundle = mlcpipe.compile(
        DEMO, target="webgpu", quantization=QUANTIZATION, kv_cache_dtype=dtype, output=tmp_path / "demo", quick=True
    )
    site = assemble_site(real_page, [bundle], title="Demo model")
    run(FILE, "pages_are_run_by_the_page_s_own_engine", site, expected=_of_the_python_engine(tmp_path, dtype))


@pytest.mark.everything
def test_chat_web(browser: Browser, chat_web: str) -> None:
    scenario(browser, FILE, "stops_and_recovers_from_a_lost_gpu", chat_web, question=QUESTION)


def plain_site(folder: Path, packages: Path, bundle: Path, script: str) -> Site:
    """A bundle, and `plain.html` with a script of its own that imports WebLLM as npm installed it."""
    site = assemble_site(folder, [bundle], title="Demo model")
    modules = {"@mlc-ai/web-llm": "/web-llm.mjs", "loglevel": "/loglevel.mjs", "url": "/empty.mjs"}
    head = f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
    loglevel = (packages / "node_modules/loglevel/dist/loglevel.js").read_text(encoding="utf-8")
    files: dict[str, Path | bytes] = {
        **site.files,
        "plain.html": f"<!doctype html><html><head>{head}</head><body></body>{script}</html>".encode(),
        "web-llm.mjs": packages / "node_modules/@mlc-ai/web-llm/lib/index.js",
        "loglevel.mjs": f"const module = {{exports: {{}}}};\n{loglevel}\nexport default module.exports;".encode(),
        "empty.mjs": b"export default {};",
    }
    return Site(files)


def test_readme_example(run: Run, packages: Path, web_bundle: Path, expected: dict[str, str], tmp_path: Path) -> None:
    """The lines of docs/targets/browser.md on a page of their own, with the packages that npm installed."""
    text = (ROOT / "docs" / "targets" / "browser.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```html\n(.*?)```", text, re.DOTALL)
    assert len(example.splitlines()) <= 11
    address = f"/models/{web_bundle.name}/"
    example = example.replace('"https://my.host/site/models/bundle/"', f'location.origin + "{address}"')
    assert address in example and QUESTION in example
    site = plain_site(tmp_path, packages, web_bundle, example)
    run(FILE, "readme_example_runs_in_plain_webllm", site, expected=expected)


# Each part has an end, so that a model without any sense finishes the object.
SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "crocodile"]},
        "legs": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
        "wild": {"type": "boolean"},
    },
    "required": ["animal", "legs", "wild"],
    "additionalProperties": False,
}


@pytest.mark.everything
def test_answers_keep_to_a_schema(run: Run, packages: Path, web_bundle: Path, tmp_path: Path) -> None:
    """WebLLM's grammar engine masks the logits by the library's `apply_bitmask_inplace`, greedy and sampled.

    JSON may have any number of spaces, which the demo model likes: `apply_logit_bias_inplace` keeps them out.
    """
    words = json.loads((web_bundle / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    spaces = {number: -100 for word, number in words.items() if not word.strip("\u0120\u010a\u0109\u010d \n\t\r")}
    assert spaces
    address = f"/models/{web_bundle.name}/"
    script = f"""<script type="module">
      import {{ CreateMLCEngine }} from "@mlc-ai/web-llm";
      const model = location.origin + "{address}", model_lib = model + "resolve/main/lib/model.wasm";
      const appConfig = {{ model_list: [{{ model_id: "mine", model, model_lib }}] }};
      const engine = await CreateMLCEngine("mine", {{ appConfig }});
      const messages = [{{ role: "user", content: "{QUESTION}" }}];
      const schema = {json.dumps(json.dumps(SCHEMA))};
      const found = [], logit_bias = {json.dumps(spaces)};
      for (const wanted of [{{ temperature: 0 }}, {{ temperature: 1, top_p: 0.9, seed: 3 }}]) {{
        const response_format = {{ type: "json_object", schema }};
        const request = {{ messages, response_format, logit_bias, max_tokens: 200, ...wanted }};
        const {{ choices }} = await engine.chat.completions.create(request);
        found.push({{ text: choices[0].message.content, why: choices[0].finish_reason }});
      }}
      const {{ choices }} = await engine.chat.completions.create({{ messages, temperature: 0, max_tokens: 8 }});
      document.body.textContent = JSON.stringify({{ found, free: choices[0].message.content }});
    </script>"""
    run(FILE, "answers_keep_to_a_schema", plain_site(tmp_path, packages, web_bundle, script))
