"""`chat serve`, the native runtime's server: its answers are those of Python's engine and server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

httpx2 = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from mlcpipe import Engine, SamplingParams
from tests.conftest import DEMO, Bundles
from tests.server.conftest import NAME, Running, running_server

pytestmark = pytest.mark.full  # compiles TVM's runtime
HELLO = [{"role": "user", "content": "Which targets are there?"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# A template that shows what it gets, and lets the model think first.
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }}{%- endif %}{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- if message.tool_calls %}{{ '<tool_call>' ~ message.tool_calls[0].function.arguments.a }}{%- endif %}{%- endfor %}"
    "{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is not false %}{{ '<think>\\n' }}"
    "{%- else %}{{ '<think></think>' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def server(program: Path, demo_bundles: Bundles) -> Iterator[Running]:
    words = (program, "--name", NAME, "--alias", "other/name", "--threads", 2)
    with running_server("-m", demo_bundles["q4f16_1"], *words[1:], program=words[:1]) as running:
        yield running


@pytest.fixture(scope="module")
def python_server(demo_bundles: Bundles) -> Iterator[Running]:
    with running_server(demo_bundles["q4f16_1"], "--name", NAME, "--alias", "other/name", "--threads", 2) as running:
        yield running


@pytest.fixture
def ai(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_greedy_answer_is_the_engine_s_whole_and_in_pieces(ai: Any, demo: Engine) -> None:
    expected = demo.chat(HELLO, sampling=SamplingParams(temperature=0)).text
    answer = ai.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    chunks = list(ai.chat.completions.create(model=NAME, messages=HELLO, temperature=0, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == expected and len(pieces) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize(
    "drawn",
    [
        {"temperature": 1.5, "seed": 7},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 2**40},
        {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 4, "logit_bias": {5: 3.0, 300: -50.0}},
    ],
)
def test_an_answer_with_a_seed_is_the_engine_s(drawn: dict[str, Any], server: Running, demo: Engine) -> None:
    demo.reset()
    expected = demo.chat(HELLO, sampling=SamplingParams(**{"top_p": 1.0, **drawn}), max_tokens=60).text
    body = {"messages": HELLO, "max_tokens": 60, "deterministic": True, **drawn}
    assert httpx2.post(server.url + CHAT, json=body).json()["choices"][0]["message"]["content"] == expected


def test_without_a_seed_answers_differ(server: Running) -> None:
    body = {"prompt": "A", "temperature": 2.0, "max_tokens": 30}
    assert len({httpx2.post(server.url + TEXT, json=body).json()["choices"][0]["text"] for _ in range(4)}) > 1


def test_usage_says_where_a_prompt_differs(server: Running) -> None:
    asked = ["Count up: " + " ".join(map(str, numbers)) for numbers in (range(60), [*range(50), 7, *range(51, 60)])]
    usages = [httpx2.post(server.url + TEXT, json={"prompt": text, "max_tokens": 1}).json()["usage"] for text in asked]
    assert usages[0]["cache_miss"]["reason"] in ("first_prompt", "prompt_differs")
    miss, cached = usages[1]["cache_miss"], usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert miss["reason"] == "prompt_differs" and cached <= miss["token"] < cached + 16 and cached >= 48


def shape(value: Any, path: str = "") -> Any:
    """JSON without what differs from call to call; of errors, without their words."""
    hidden = ("id", "created", "cached_tokens")
    python_alone = ("cache_miss", "timings", "system_fingerprint")
    if isinstance(value, dict):
        if "error" in value:
            return {key: value["error"][key] for key in ("type", "param", "code")} | {"keys": sorted(value["error"])}
        listed = sorted((key, one) for key, one in value.items() if key not in python_alone)
        return {key: type(one).__name__ if key in hidden else shape(one) for key, one in listed}
    return [shape(one) for one in value] if isinstance(value, list) else value


def joined(response: Any) -> list[Any]:
    """A stream: the shape of its first event and of the last ones, and all deltas as one."""
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8" and lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text, reasoning, others = "", "", []
    for event in events:
        for choice in event["choices"]:
            delta = choice.get("delta", choice)
            text += delta.get("content", delta.get("text")) or ""
            reasoning += delta.get("reasoning_content") or ""
        event_shape = shape(event)
        for choice in event_shape["choices"]:
            choice.get("delta", choice).pop("content", None)
            choice.pop("text", None)
        if event_shape not in others:
            others.append(event_shape)
    return [text, reasoning, others]


BODIES: list[tuple[str, Any]] = [
    (CHAT, {"messages": HELLO}),
    (CHAT, {"messages": HELLO, "stream": True}),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}),
    (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 7, "model": "other/name"}),
    (CHAT, {"messages": HELLO, "max_tokens": 40, "ignore_eos": True, "user": "x", "store": False, "metadata": {}}),
    (CHAT, {"messages": HELLO, "stop": " the"}),
    (CHAT, {"messages": HELLO, "stop": ["target", "zzz"], "stream": True}),
    (CHAT, {"messages": HELLO, "n": 1, "logprobs": False, "response_format": {"type": "text"}, "top_k": -1}),
    (CHAT, {"messages": HELLO, "unknown": [1, {"a": None}], "temperature": None, "stop": None, "seed": 5}),
    (CHAT, {"messages": [{"role": "system", "content": "Be short."}, {"role": "developer", "content": "é<|im_end|>"},
                         {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "!"}]},
                         {"role": "assistant", "content": None}, {"role": "user", "content": "ok", "name": "x"}]}),
    (TEXT, {"prompt": "A compiler"}),
    (TEXT, {"prompt": ["A compiler"], "max_tokens": 3, "stream": True}),
    (TEXT, {"prompt": "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "max_tokens": 60}),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "priority": -5, "service_tier": "flex", "timeout": 60}),
    (CHAT, {"messages": HELLO, "max_tokens": 4, "service_tier": "priority"}),
    # refused
    (CHAT, {}),
    (CHAT, {"messages": HELLO, "priority": 1001}),
    (CHAT, {"messages": HELLO, "priority": 0.5}),
    (CHAT, {"messages": HELLO, "timeout": 0}),
    (CHAT, {"messages": HELLO, "timeout": "soon"}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [1]}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": [{"role": "other", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, {"messages": HELLO, "model": "gpt-4"}),
    (CHAT, {"messages": HELLO, "temperature": "x"}),
    (CHAT, {"messages": HELLO, "temperature": True}),
    (CHAT, {"messages": HELLO, "temperature": 1000}),
    (CHAT, {"messages": HELLO, "top_p": 0, "stream": True}),
    (CHAT, {"messages": HELLO, "top_k": -2}),
    (CHAT, {"messages": HELLO, "max_tokens": 1.5}),
    (CHAT, {"messages": HELLO, "seed": "x"}),
    (CHAT, {"messages": HELLO, "logit_bias": {"x": 1}}),
    (CHAT, {"messages": HELLO, "logit_bias": {"5": 1000}}),
    (CHAT, {"messages": HELLO, "logit_bias": {"999999": 1}}),
    (CHAT, {"messages": HELLO, "typical_p": 1, "min_tokens": 0, "repeat_penalty": 1.1, "max_tokens": 3}),
    (CHAT, {"messages": HELLO, "stop": ""}),
    (CHAT, {"messages": HELLO, "max_tokens": -1}),
    (CHAT, {"messages": HELLO, "stop": ["x"] * 129}),
    (CHAT, {"messages": HELLO, "stream": "yes"}),
    (CHAT, {"messages": HELLO, "modalities": ["audio"]}),
    (CHAT, {"messages": HELLO, "audio": {}}),
    (CHAT, {"messages": HELLO, "functions": []}),
    (CHAT, {"messages": HELLO, "reasoning_effort": "huge"}),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": ""}}]}),
    (CHAT, {"messages": HELLO, "tool_choice": "sometimes"}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 4000}]}),
    (CHAT, [1]),
    (TEXT, {"prompt": ""}),
    (TEXT, {"prompt": "x", "best_of": 2}),
    (TEXT, {"prompt": 5}),
]  # fmt: skip
SAME_WORDS = ("context_length_exceeded", "model_not_found")


def ask(server: Running, path: str, body: Any) -> Any:
    # What an earlier answer left in the cache was computed by other kernels: it may change a token.
    greedy = {"temperature": 0, "deterministic": True, **body} if isinstance(body, dict) else body
    return httpx2.post(server.url + path, json=greedy, timeout=60)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=lambda value: json.dumps(value)[:60])
def test_python_s_server_gives_the_same(path: str, body: Any, server: Running, python_server: Running) -> None:
    ours, theirs = (ask(one, path, body) for one in (server, python_server))
    assert ours.status_code == theirs.status_code, (ours.text, theirs.text)
    if ours.headers["content-type"].startswith("text/event-stream"):
        assert joined(ours)[:2] == joined(theirs)[:2]
        assert all(event in joined(theirs)[2] for event in joined(ours)[2][:-1]), joined(ours)
    elif ours.status_code == 200:
        assert shape(ours.json()) == shape(theirs.json())
    else:
        found, expected = ours.json()["error"], theirs.json()["error"]
        for name in ("n_prompt_tokens", "n_ctx"):  # as llama-server; Python alone has them
            expected.pop(name, None)
        assert found.keys() == expected.keys()
        assert (found["type"], found["code"]) == (expected["type"], expected["code"])
        assert (expected["param"] or "").partition(".")[0] in (found["param"] or "")
        assert expected["code"] not in SAME_WORDS or found == expected


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/other/name", "/v1/models/x", "/health", "/nowhere", CHAT])
def test_python_s_server_gives_the_same_for_paths(path: str, server: Running, python_server: Running) -> None:
    ours, theirs = (httpx2.get(one.url + path) for one in (server, python_server))
    assert ours.status_code == theirs.status_code
    found, expected = ours.json(), theirs.json()
    for one in (expected, *expected.get("data", ())):
        if "id" in one:
            del one["state"], one["status"]  # of a pool, and what its clients ask for
        for name in ("tool_format", "bytes", "digest"):
            one.get("meta", {}).pop(name, None)
    assert shape(found) == shape(expected)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *((CHAT, field, value) for field, value in [
            ("n", 2), ("logprobs", True), ("top_logprobs", 3), ("response_format", {"type": "json_object"}),
            ("max_tokens", 0), ("min_tokens", 3), ("regex", "a+"), ("grammar", "start: x"), ("cache_salt", "x"), ("tool_choice", "required"),
            ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("tools", [TOOL]),
        ]),
        *((TEXT, field, value) for field, value in [
            ("echo", True), ("suffix", "x"), ("logprobs", 1), ("prompt", [1, 2]), ("prompt", ["a", "b"]),
        ]),
    ],
)  # fmt: skip
def test_what_it_cannot_do_it_refuses_by_name(path: str, field: str, value: Any, server: Running) -> None:
    response = ask(server, path, {"messages": HELLO, "prompt": "x", field: value})
    assert response.status_code == 400 and response.json()["error"]["param"] == field
    assert response.json()["error"]["message"].startswith(f"{field}: ")


@pytest.fixture(scope="module")
def thinking(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose chat template takes tools and begins to think."""
    checkpoint = tmp_path_factory.mktemp("thinking") / "checkpoint"
    shutil.copytree(DEMO, checkpoint)
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return Bundles(checkpoint, checkpoint.parent)["q4f16_1"]


def test_reasoning_and_tools_are_those_of_python_s_server(program: Path, thinking: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": HELLO},
        {"messages": HELLO, "stream": True, "max_tokens": 20},
        {"messages": HELLO, "reasoning_effort": "none"},
        {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}},
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "x"},
            ]
        },
    ]
    tools = [{"messages": HELLO, "tools": [TOOL]}, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}]
    with (
        running_server("-m", thinking, "--name", NAME, program=(program,)) as ours,
        running_server(thinking, "--name", NAME) as theirs,
    ):
        for body in bodies:
            found, expected = ask(ours, CHAT, body), ask(theirs, CHAT, body)
            if body.get("stream"):
                assert joined(found)[:2] == joined(expected)[:2] and joined(found)[1]
            else:
                assert shape(found.json()) == shape(expected.json())
        counts = []
        for body in tools:
            found, expected = ask(ours, CHAT, body).json(), ask(theirs, CHAT, body).json()
            counts.append(found["usage"]["prompt_tokens"])
            assert counts[-1] == expected["usage"]["prompt_tokens"]
        assert counts[0] > counts[1]


def test_clients_at_the_same_time_get_what_each_gets_alone(server: Running) -> None:
    drawn = [{"temperature": 1.2, "seed": 5}, {"temperature": 0}, {"temperature": 1, "seed": 8, "presence_penalty": 1}]
    bodies = [
        {"prompt": "Many targets " * (1 + 9 * number), "max_tokens": 30, "deterministic": True, **drawn[number % 3]}
        for number in range(8)
    ]

    def ask(body: dict[str, Any]) -> str:
        text: str = httpx2.post(server.url + TEXT, json=body, timeout=100).json()["choices"][0]["text"]
        return text

    expected = [ask(body) for body in bodies]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ask, bodies)) == expected
    assert len(set(expected)) > 4
