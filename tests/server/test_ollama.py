"""Ollama's API with Ollama's own client for Python, unmodified, against what the engine itself answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

ollama = pytest.importorskip("ollama")
pytest.importorskip("fastapi")

from tests.server.conftest import NAME, Running

if TYPE_CHECKING:
    from mlcpipe import Engine

HELLO = [{"role": "user", "content": "Which targets are there?"}]
GREEDY = {"temperature": 0}
WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def api(server: Running) -> Iterator[Any]:
    with ollama.Client(host=server.url) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    from mlcpipe import SamplingParams

    return demo.chat(HELLO, sampling=SamplingParams(temperature=0)).text


def test_a_chat_is_the_engine_s_whole_and_in_lines(api: Any, expected: str) -> None:
    whole = api.chat(NAME, HELLO, options=GREEDY)
    assert (whole.message.content, whole.message.role, whole.done, whole.done_reason) == (
        expected,
        "assistant",
        True,
        "stop",
    )
    lines = list(api.chat(f"{NAME}:latest", HELLO, options=GREEDY, stream=True))
    assert "".join(one.message.content for one in lines) == expected
    assert [one.done for one in lines] == [False] * (len(lines) - 1) + [True] and len(lines) > 5
    last = lines[-1]
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 0


def test_a_prompt_goes_through_the_template_unless_it_is_raw(api: Any, demo: Engine, expected: str) -> None:
    from mlcpipe import SamplingParams

    assert api.generate(NAME, HELLO[0]["content"], options=GREEDY).response == expected
    told = [{"role": "system", "content": "Say yes."}, *HELLO]
    own = demo.chat(told, sampling=SamplingParams(temperature=0)).text
    assert api.generate(NAME, HELLO[0]["content"], system="Say yes.", options=GREEDY).response == own
    text = demo.generate("The targets are", sampling=SamplingParams(temperature=0), max_tokens=12).text
    lines = list(api.generate(NAME, "The targets are", raw=True, stream=True, options={**GREEDY, "num_predict": 12}))
    assert "".join(one.response for one in lines) == text and lines[-1].done_reason == "length"


def test_options_are_those_of_our_fields(api: Any, server: Running, expected: str) -> None:
    def said(**options: Any) -> str:
        return str(api.chat(NAME, HELLO, options=options).message.content)

    options = {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": 7, "repeat_penalty": 1.3}
    fields = {"messages": HELLO, "max_tokens": 12, **options}
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        ours = client.post("/v1/chat/completions", json=fields).json()["choices"][0]["message"]["content"]
    assert said(**options, num_predict=12) == ours != expected
    assert said(**GREEDY, stop=[expected[10:14]]) == expected[: expected.index(expected[10:14])]
    most = api.chat(NAME, HELLO, options={**GREEDY, "num_ctx": 50})
    assert most.prompt_eval_count + most.eval_count == 50 and most.done_reason == "length"
    assert said(**GREEDY, num_ctx=1 << 20, num_thread=3, num_keep=4, num_predict=-1) == expected


def test_the_form_of_an_answer(api: Any) -> None:
    for form in ("json", WEATHER):
        made = api.chat(NAME, HELLO, format=form, options={**GREEDY, "num_predict": 60})
        assert made.message.content.startswith("{")
        assert form == "json" or json.loads(made.message.content)["unit"] in "CF"
    assert json.loads(api.generate(NAME, "a", format=WEATHER, raw=True).response)["unit"] in "CF"


def test_calls_and_their_results(api: Any, client: httpx2.Client) -> None:
    """The demo model knows no calls: a grammar that allows nothing else makes it write one."""

    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    call = 'start: "<tool_call>\\n{\\"name\\": \\"weather\\", \\"arguments\\": {\\"unit\\": \\"C\\"}}\\n</tool_call>"'
    for stream in (False, True):
        body = {"model": NAME, "messages": HELLO, "stream": stream, "tools": [tool], "grammar": call}
        made = client.post("/api/chat", json=body)
        lines = [ollama.ChatResponse(**json.loads(line)) for line in made.text.splitlines()]
        calls = [call for line in lines for call in line.message.tool_calls or ()]
        assert [(one.function.name, one.function.arguments) for one in calls] == [("weather", {"unit": "C"})]
    history = [*HELLO, {"role": "assistant", "tool_calls": [one.model_dump() for one in calls]},
               {"role": "tool", "tool_name": "weather", "content": "4 C"}]  # fmt: skip
    assert api.chat(NAME, history, tools=[tool], options={**GREEDY, "num_predict": 2}).done


def test_log_probabilities(api: Any) -> None:
    for stream in (False, True):
        made = api.chat(NAME, HELLO, logprobs=True, top_logprobs=2, options={**GREEDY, "num_predict": 3}, stream=stream)
        tokens = [token for line in (made if stream else [made]) for token in line.logprobs or ()]
        assert len(tokens) == 3 and all(one.logprob == one.top_logprobs[0].logprob for one in tokens)


def test_the_model_in_lists_and_facts(api: Any, demo: Engine) -> None:
    (listed,) = api.list().models
    assert listed.model == f"{NAME}:latest" and listed.size > 0 and len(listed.digest) == 64
    assert listed.details.quantization_level == "q4f16_1" and listed.details.family == "llama"
    (running,) = api.ps().models
    assert running.context_length == demo.context_length and running.model == listed.model
    shown = api.show(listed.model)
    assert shown.modelinfo["llama.context_length"] == demo.context_length
    assert shown.capabilities[0] == "completion" and "insert" not in shown.capabilities
    assert shown.template == demo.tokenizer.chat_templates["default"]


def test_what_only_loads_or_unloads(api: Any) -> None:
    assert api.generate(NAME, "").done_reason == "load"
    assert api.chat(NAME, []).done_reason == "load"
    assert api.generate(NAME, keep_alive=0).done_reason == "unload"
    assert [one.status for one in api.pull(NAME, stream=True)][-1] == "success"


@pytest.mark.parametrize(
    ("ask", "status", "word"),
    [
        (lambda api: api.chat("other", HELLO), 404, "other"),
        (lambda api: api.chat(NAME, [{**HELLO[0], "images": [b"a"]}]), 400, "messages[0].images"),
        (lambda api: api.generate(NAME, "a", images=[b"a"]), 400, "images"),
        (lambda api: api.generate(NAME, "a", context=[1]), 400, "context"),
        (lambda api: api.generate(NAME, "a", template="{{ .Prompt }}"), 400, "template"),
        (lambda api: api.generate(NAME, "a", suffix="b"), 400, "suffix"),
        (lambda api: api.generate(NAME, "a", width=5), 400, "width"),
        (lambda api: api.generate(NAME, "a", think=True), 400, "think"),
        (lambda api: api.chat(NAME, HELLO, options={"tfs_z": 0.5}), 400, "tfs_z"),
        (lambda api: api.chat(NAME, HELLO, options={"num_predict": "a"}), 400, "num_predict"),
        (lambda api: api.chat(NAME, HELLO, options={"num_ctx": 3}), 400, "3"),
        (lambda api: api.chat(NAME, HELLO, options={"temperature": 1000}), 400, "temperature"),
        (lambda api: api.chat(NAME, HELLO, options={"stop": 5}), 400, "stop"),
        (lambda api: api.generate(NAME, "", keep_alive="soon"), 400, "keep_alive"),
        (lambda api: list(api.chat(NAME, [{"role": "king", "content": "a"}], stream=True)), 400, "role"),
        (lambda api: api.pull("other"), 404, "other"),
        (lambda api: api.delete(NAME), 403, "--api-key"),
        (lambda api: api.copy("other", "more"), 404, "other"),
        (lambda api: api.copy(NAME, NAME), 400, "destination"),
        (lambda api: api.create("other", from_=NAME), 404, "/api/create"),
        (lambda api: api.embed(NAME, "a"), 404, "/api/embed"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(api: Any, ask: Any, status: int, word: str) -> None:
    with pytest.raises(ollama.ResponseError, match=".*") as refused:
        ask(api)
    assert refused.value.status_code == status and word in refused.value.error


def test_a_copy_is_another_name(api: Any, expected: str) -> None:
    assert api.copy(NAME, "mine").status == "success"
    assert [one.model for one in api.list().models] == [f"{NAME}:latest", "mine:latest"]
    assert api.chat("mine", HELLO, options=GREEDY).message.content == expected
    assert api.delete("mine").status == "success"
    with pytest.raises(ollama.ResponseError, match="mine"):
        api.chat("mine", HELLO)


def test_a_client_may_be_asynchronous(server: Running, expected: str) -> None:
    import asyncio

    async def ask() -> str:
        async with ollama.AsyncClient(host=server.url) as api:
            lines = await api.chat(NAME, HELLO, options=GREEDY, stream=True)
            return "".join([one.message.content async for one in lines])

    assert asyncio.run(ask()) == expected


def test_the_version_is_new_enough_for_editors(client: httpx2.Client) -> None:
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert client.head("/").status_code == 200
