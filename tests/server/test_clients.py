"""Clients of others, unmodified, that are too many for every run: each is skipped where it is not installed.

    pip install NAME; pytest -m everything tests/server/test_clients.py -k NAME

Those of every run stand beside what they ask: openai, anthropic, ollama (Python and JavaScript), langchain. Requests in
the form of Claude Code, Codex and llama.vim are in test_anthropic.py, test_responses.py and unit/server/test_llama_cpp.py.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytestmark = [pytest.mark.everything, pytest.mark.filterwarnings("ignore")]  # those of the clients

from tests.server.conftest import NAME, Running

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
