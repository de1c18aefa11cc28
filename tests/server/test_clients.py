"""Clients of others, unmodified, that are too many for every run: each is skipped where it is not installed.

    pip install NAME; pytest -m everything tests/server/test_clients.py -k NAME
    npm install --no-save --prefix tests/server ai @ai-sdk/{anthropic,openai,openai-compatible} zod  # vercel
    npm install --global @openai/codex @anthropic-ai/claude-code  # programs

Those of every run stand beside what they ask: openai, anthropic, ollama (Python and JavaScript), langchain. Requests in
the form of Claude Code, Codex and llama.vim are in test_anthropic.py, test_responses.py and unit/server/test_llama_cpp.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytestmark = [pytest.mark.everything, pytest.mark.filterwarnings("ignore")]  # those of the clients

from tests.conftest import DEMO, QUICK
from tests.server.conftest import NAME, Running, running_server

ASK = "Which targets are there?"
HELLO = [{"role": "user", "content": ASK}]
MOST = 40  # tokens


class Verdict(BaseModel):
    """An open object, as clients send it: without `additionalProperties`."""

    answer: Literal["yes", "no"]


@pytest.fixture
def url(server: Running) -> str:
    return f"{server.url}/v1"


@pytest.fixture(scope="module")
def expected(server: Running) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as made:
        answer = made.chat.completions.create(model=NAME, messages=HELLO, temperature=0, max_tokens=MOST)
        return str(answer.choices[0].message.content)


def test_langgraph(url: str) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat_openai(base_url=url, api_key="none", model=NAME, max_tokens=MOST, temperature=0)

    def clock(city: str) -> str:
        """The time in a city."""
        return f"noon in {city}"

    said = prebuilt.create_react_agent(model, [clock]).invoke({"messages": HELLO})["messages"]
    assert said[0].content == ASK and said[1].type == "ai"


@pytest.mark.parametrize("kind", ["tool", "native"])
def test_pydantic_ai(url: str, kind: str) -> None:
    ai = pytest.importorskip("pydantic_ai")
    models, providers = (pytest.importorskip(f"pydantic_ai.{one}.openai") for one in ("models", "providers"))
    model = models.OpenAIChatModel(NAME, provider=providers.OpenAIProvider(base_url=url, api_key="none"))
    output: Any = Verdict if kind == "tool" else ai.NativeOutput(Verdict)
    agent = ai.Agent(model, output_type=output, model_settings={"max_tokens": 200, "seed": 1})
    assert isinstance(agent.run_sync("yes or no?").output, Verdict)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(url: str, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        client = instructor.from_openai(made, mode=instructor.Mode[mode])
        found = client.chat.completions.create(
            model=NAME, messages=HELLO, response_model=Verdict, max_retries=0, max_tokens=200, seed=1
        )
    assert isinstance(found, Verdict)


@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as made:
            model = getattr(agents, api)(NAME, made)
            settings = agents.ModelSettings(max_tokens=200)
            agent = agents.Agent(name="a", model=model, output_type=Verdict, model_settings=settings)
            return (await agents.Runner.run(agent, "yes or no?")).final_output

    assert isinstance(asyncio.run(ask()), Verdict)


def test_llama_index(url: str, expected: str) -> None:
    like = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    message = pytest.importorskip("llama_index.core.llms").ChatMessage
    model = like(model=NAME, api_base=url, api_key="none", is_chat_model=True, temperature=0, max_tokens=MOST)
    asked = [message(role="user", content=ASK)]
    assert model.chat(asked).message.content == expected
    assert "".join(part.delta or "" for part in model.stream_chat(asked)) == expected


def test_smolagents(url: str, expected: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.OpenAIServerModel(NAME, api_base=url, api_key="none", temperature=0, max_tokens=MOST)
    message = smolagents.ChatMessage(role="user", content=[{"type": "text", "text": ASK}])
    assert model([message]).content == expected


def test_llm(url: str, expected: str) -> None:
    chat = pytest.importorskip("llm.default_plugins.openai_models").Chat
    model = chat(NAME, api_base=url)
    model.key = "none"
    assert model.prompt(ASK, temperature=0, max_tokens=MOST).text() == expected


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm", "lm_studio", "ollama_chat"])
def test_litellm(server: Running, url: str, expected: str, prefix: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = server.url if prefix == "ollama_chat" else url
    more = {"api_base": base, "api_key": "none", "temperature": 0, "max_tokens": MOST}
    whole = litellm.completion(f"{prefix}/{NAME}", HELLO, **more)
    assert whole.choices[0].message.content == expected
    parts = litellm.completion(f"{prefix}/{NAME}", HELLO, stream=True, **more)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected


def test_haystack(url: str, expected: str) -> None:
    generators = pytest.importorskip("haystack.components.generators.chat")
    message, secret = (
        pytest.importorskip("haystack.dataclasses").ChatMessage,
        pytest.importorskip("haystack.utils").Secret,
    )
    settings = {"temperature": 0, "max_tokens": MOST}
    made = generators.OpenAIChatGenerator(
        api_key=secret.from_token("none"), model=NAME, api_base_url=url, generation_kwargs=settings
    )
    (reply,) = made.run([message.from_user(ASK)])["replies"]
    assert reply.text == expected


@pytest.mark.parametrize("kind", ["from_openai", "from_vllm", "from_sglang"])
def test_outlines(url: str, kind: str) -> None:
    """`from_vllm` and `from_sglang` send their own names of fields, which servers ignored."""
    outlines = pytest.importorskip("outlines")
    with openai.OpenAI(base_url=url, api_key="none") as made:
        model = getattr(outlines, kind)(made, NAME)
        assert Verdict.model_validate_json(model("yes or no?", Verdict, max_tokens=100))
        if kind != "from_openai":
            assert re.fullmatch("[ab]{3}", model("a or b?", outlines.regex("[ab]{3}"), max_tokens=9))


def test_semantic_kernel(url: str, expected: str) -> None:
    api = pytest.importorskip("semantic_kernel.connectors.ai.open_ai")
    history = pytest.importorskip("semantic_kernel.contents").ChatHistory()
    history.add_user_message(ASK)

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as made:
            service = api.OpenAIChatCompletion(ai_model_id=NAME, async_client=made)
            settings = api.OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MOST)
            return str(await service.get_chat_message_content(history, settings))

    assert asyncio.run(ask()) == expected


def test_aider(url: str, tmp_path: Path) -> None:
    if (aider := shutil.which("aider")) is None:
        pytest.skip("no aider")
    quiet = [
        "--no-git",
        "--yes-always",
        "--no-stream",
        "--no-show-model-warnings",
        "--no-check-update",
        "--edit-format",
        "ask",
    ]
    base = ["--openai-api-base", url, "--openai-api-key", "none", "--model", f"openai/{NAME}"]
    command = [aider, *quiet, *base, "--message", ASK]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Tokens:" in done.stdout, done.stdout + done.stderr


def test_vercel_ai(url: str, expected: str) -> None:
    script = Path(__file__).with_name("vercel_ai.mjs")
    if shutil.which("node") is None or not script.with_name("node_modules").joinpath("ai").is_dir():
        pytest.skip("no ai of npm")
    asked = json.dumps({"url": url, "name": NAME, "prompt": ASK})
    done = subprocess.run(["node", script, asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == ["compatible", "chat", "responses", "anthropic"]
    for one in found.values():
        assert one["whole"] == one["streamed"] == expected
        assert one["calls"] in ([["clock", "Bern"]], [["clock", "Rome"]]) and one["reason"] == "tool-calls"
        assert one["formed"] in ("yes", "no")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The demo model with room for the prompts of programs, 10,000 to 40,000 tokens: it answers in the form asked."""
    checkpoint = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("long") / "demo"))
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}))
    options = ("--name", NAME, "--context", 1 << 17, "--sequences", 2, "--target", QUICK)
    with running_server(checkpoint, *options, life_s=3600) as running:
        yield running


def test_codex(long: Running, tmp_path: Path) -> None:
    if (codex := shutil.which("codex")) is None:
        pytest.skip("no codex")
    provider = {"name": "local", "base_url": f"{long.url}/v1", "wire_api": "responses"}
    options = [f"model_providers.local.{key}={json.dumps(value)}" for key, value in provider.items()]
    command = [codex, "exec", "--skip-git-repo-check", "-m", NAME, "-c", 'model_provider="local"']
    command += [word for option in options for word in ("-c", option)]
    home = {**os.environ, "HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, ASK], cwd=tmp_path, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_claude_code(long: Running, tmp_path: Path) -> None:
    if (claude := shutil.which("claude")) is None:
        pytest.skip("no claude")
    home = {
        **os.environ, "HOME": str(tmp_path), "ANTHROPIC_BASE_URL": long.url, "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(MOST),
    }  # fmt: skip
    command = [claude, "-p", ASK, "--model", NAME, "--output-format", "json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert not told["is_error"] and told["result"] and told["usage"]["input_tokens"] > 1000
