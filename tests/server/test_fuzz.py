"""Damaged bodies: each gets an answer or a refusal in the API's form, and the server continues without a traceback."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import Running

ASK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]}]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}
TOOL = {"type": "function", "name": "f", "function": {"name": "f", "parameters": SCHEMA}, "input_schema": SCHEMA}
COMMON = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stream": False, "seed": 1, "timeout": 0.3, "priority": 0, "logit_bias": {"3": 1}, "stop": ["x"], "tools": [TOOL], "cache_salt": "s"}  # fmt: skip
NEWER = {name: value for name, value in COMMON.items() if name not in ("max_tokens", "stop")}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**COMMON, "messages": ASK, "n": 2, "logprobs": True, "top_logprobs": 2, "tool_choice": "auto", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"},
    "/v1/completions": {**COMMON, "prompt": ["a", "b"], "echo": True, "n": 1, "regex": "[a-z]+", "suffix": None},
    "/v1/responses": {**NEWER, "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"type": "reasoning", "summary": []}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "b"}], "text": {"format": {"type": "json_object"}}, "max_output_tokens": 4, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}},
    "/v1/messages": {**NEWER, "max_tokens": 4, "tools": [{"name": "f", "input_schema": SCHEMA}], "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "c", "content": "b"}]}], "system": [{"type": "text", "text": "s"}], "tool_choice": {"type": "any"}, "stop_sequences": ["x"], "thinking": {"type": "enabled"}},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}], "system": "s", "tools": [TOOL]},
    "/api/chat": {"model": "demo", "messages": ASK, "tools": [TOOL], "format": SCHEMA, "think": False, "logprobs": True, "keep_alive": "5m", "stream": False, "options": {"num_predict": 4, "num_ctx": 200, "stop": ["x"], "temperature": 0.5, "seed": -1, "timeout": 0.3}},
    "/api/generate": {"model": "demo", "prompt": "a", "raw": True, "format": "json", "context": [], "stream": False, "options": {"num_predict": 4}},
    "/completion": {**COMMON, "tools": [], "prompt": ["a", [1, "b"]], "n_predict": 3, "n_probs": 2, "samplers": ["top_k", "infill"], "logit_bias": [["a", False], [3, 1.5]], "response_fields": ["content", "timings/prompt_n"], "n_indent": 2, "t_max_predict_ms": 300},
    "/apply-template": {"messages": ASK, "tools": [TOOL]},
    "/api/show": {"model": "demo", "verbose": True},
    "/tokenize": {"messages": ASK, "tools": [TOOL], "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip


def nested(depth: int) -> Any:
    made: Any = "x"
    for _ in range(depth):
        made = [made] if depth % 2 else {"a": made}
    return made


STRANGE: list[Any] = [None, True, False, 0, -1, 1 << 70, -(1 << 70), 1.5, 1e300, "", "a\0b", "\u202e", "<|im_end|>", "𝠀", "x" * 70000, [], {}, [None], {"": None}, [[]], {"type": "text"}, {"type": None}, {"role": "user"}, ["text"], nested(60), nested(150), nested(151)]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in keys for place in places(value[key], (*path, key)))]


def damaged(body: dict[str, Any], draw: random.Random) -> bytes:
    """One to three places have another value or none; now and then the bytes are damaged too."""
    made = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if not made:
            break
        *path, last = draw.choice(places(made)[1:])
        holder = made
        for key in path:
            holder = holder[key]
        if draw.random() < 0.2:
            del holder[last]
        else:
            holder[last] = copy.deepcopy(draw.choice(STRANGE))
    data = bytearray(json.dumps(made, ensure_ascii=draw.random() < 0.5).encode())
    if draw.random() < 0.15:
        for _ in range(draw.choice((1, 5))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    if draw.random() < 0.05:
        del data[draw.randrange(len(data)) :]
    return bytes(data)


def message_of(answer: httpx2.Response, path: str) -> str:
    """The refusal's words, which Ollama's API has alone."""
    error = answer.json()["error"]
    if path.startswith("/api/"):
        error = {"message": error, "type": "error"}
    assert isinstance(error["message"], str) and error["type"]
    return error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_damaged_bodies(client: httpx2.Client, server: Running, path: str) -> None:
    accepted = 0
    for seed in range(50):
        answer = client.post(path, content=damaged(BODIES[path], random.Random(f"{path} {seed}")))
        assert answer.status_code < 500 or answer.status_code == 503, (seed, answer.text)
        if answer.headers["content-type"] != "application/json":
            assert answer.headers["content-type"].startswith(("text/event-stream", "application/x-ndjson")), seed
        elif answer.status_code == 200:
            accepted += 1
            answer.json()
        else:
            assert "Traceback" not in message_of(answer, path), seed
    assert 0 < accepted < 50
    assert client.get("/health").status_code == 200
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 100_000, b"\0", b'"\\ud800"', b"1" * 100_000, b'{"messages": [' + b"{}," * 100_000 + b"{}]}", b"{" + b'"a":1,' * 100_000 + b'"b":2}', "{'messages': 1}".encode("utf-16")],
    ids=range(10),
)  # fmt: skip
def test_bytes_that_are_no_body(client: httpx2.Client, data: bytes) -> None:
    for path in BODIES:
        answer = client.post(path, content=data)
        assert answer.status_code == 400
        assert message_of(answer, path)
