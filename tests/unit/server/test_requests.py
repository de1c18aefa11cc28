"""Requests to a server whose engine is a script: what is counted, refused before it is computed, and loosened."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource
from mlcpipe.runtime.serving.interface import EngineStats, OverloadedError
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import Rules
from mlcpipe.server.listening import bound_socket
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.run import Loaded, serve
from mlcpipe.server.service import Facts
from tests.unit.server.fake_engine import FakeEngine, answers

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "{text}"}]}),
        ("/v1/completions", {"prompt": "{text}"}),
        ("/v1/responses", {"input": "{text}"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "{text}"}], "max_tokens": 5}),
        ("/tokenize", {"content": "{text}"}),
    ],
)
def test_a_text_that_no_context_holds_is_not_encoded(path: str, body: Any) -> None:
    engine = FakeEngine()
    most = 16 * engine.context_length + (1 << 20)
    long = json.dumps(body).replace("{text}", "a" * (most + 1)).encode()
    (refused,) = answers(engine, (path, long))
    assert refused.status_code == 400 and "the text is too long" in refused.text and not engine.asked
    if path in (CHAT, "/v1/completions"):
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_may_end_inside_the_last_message_or_behind_it() -> None:
    engine = FakeEngine(" 4")
    conversation = [*HELLO, {"role": "assistant", "content": "2 + 2 is"}]
    parts = [{"type": "text", "text": text} for text in ("2 + ", "2 is")]
    asked: list[dict[str, Any]] = [
        {}, {"add_generation_prompt": True}, {"add_generation_prompt": False},
        {"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False},
        *({"messages": [*HELLO, {**conversation[-1], name: True}]} for name in ("prefix", "partial")),
        {"messages": [*HELLO, {"role": "assistant", "content": parts}], "continue_final_message": True},
    ]  # fmt: skip
    found = answers(engine, *((CHAT, {"messages": conversation, **one}) for one in asked))
    prompts = [engine.tokenizer.decode(one.tokens, skip_special_tokens=False) for one in engine.asked]
    before = prompts[3].removesuffix("2 + 2 is")
    ends = [prompt.removeprefix(before) for prompt in prompts]
    written = "2 + 2 is<|im_end|>\n"
    assert ends == [written + "<|im_start|>assistant\n"] * 2 + [written] + ["2 + 2 is"] * 5
    assert all(one.json()["choices"][0]["message"]["content"] == " 4" for one in found)
    counted = answers(engine, *(("/tokenize", {"messages": conversation, **one}) for one in asked))
    assert [one.json()["tokens"] for one in counted] == [one.tokens for one in engine.asked]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/v1/responses", {"input": [*HELLO, {"role": "king", "content": "a"}]}, "input[1].role"),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content"),
        ("/v1/responses", {"input": [*HELLO, {"type": "function_call", "name": 5}]}, "input[1].name"),
        ("/v1/responses", {"input": [*HELLO, {"type": "function_call_output", "output": [5]}]}, "input[1].output"),
        ("/v1/messages", {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "name": 5}]}, *HELLO]}, "messages[1].tool_calls"),
        ("/api/chat", {"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
    ],
    ids=range(7),
)  # fmt: skip
def test_a_wrong_message_is_named_as_its_client_placed_it(path: str, body: dict[str, Any], place: str) -> None:
    """Without the message of the system that the server puts before it."""
    more = {"/v1/responses": {"instructions": "a"}, "/v1/messages": {"system": "a", "max_tokens": 5}}.get(path, {})
    engine = FakeEngine()
    (answer,) = answers(engine, (path, {"model": "demo", **body, **more}))
    error = answer.json()["error"]
    assert (answer.status_code, engine.asked) == (400, [])
    assert re.match(re.escape(place) + "[:;] ", error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        ([{"role": "assistant", "content": "a"}], {"add_generation_prompt": True}),
        (HELLO, {}),
        ([{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}], {}),
        ([{"role": "assistant", "content": "a"}], {"chat_template_kwargs": {"continue_final_message": True}}),
        ([], {}),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_what_cannot_be_continued(path: str, messages: list[Any], more: dict[str, Any]) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, (path, {"messages": messages, "continue_final_message": True, **more}))
    assert answer.status_code == 400 and not engine.asked
    assert "continue_final_message" in answer.json()["error"]["message"]


def test_a_long_prediction_is_cut() -> None:
    engine = FakeEngine()
    engine.tokenizer.most_chars = 300
    prediction = {"type": "content", "content": "cat " * 5000}
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, "prediction": prediction}))
    assert answer.status_code == 200
    (request,) = engine.asked
    assert list(request.prediction) == engine.tokenizer.encode("cat " * 75)


def test_a_template_for_tools_and_calls_that_are_none() -> None:
    engine = FakeEngine()
    engine.tokenizer.chat_templates["tool_use"] = "{{ tools[0].function.name }}{{ messages[0].keys() | list }}"
    tools = {"tools": [{"type": "function", "function": {"name": "rain"}}]}
    said = [{"messages": [{"role": "assistant", "content": "", **calls}]} for calls in ({}, {"tool_calls": []})]
    bodies = [{**one, **more} for more in ({}, {"tools": []}, tools) for one in said]
    found = [
        engine.tokenizer.decode(one.json()["tokens"])
        for one in answers(engine, *(("/tokenize", one) for one in bodies))
    ]
    assert found[4:] == ["rain['role', 'content']"] * 2 and len({*found[:4]}) == 1 and "assistant" in found[0]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_a_shifted_context_lost(stream: bool) -> None:
    bodies = (
        (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
    )
    asked = [(path, {**body, "stream": stream}) for path, body in bodies]
    for dropped in (48, 0):
        assert all(f'"dropped_tokens":{dropped}' in one.text for one in answers(FakeEngine(dropped=dropped), *asked))
    assert not any("dropped_tokens" in one.text for one in answers(FakeEngine(), *asked))


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})])
def test_each_event_has_the_usage_so_far_where_it_is_asked(path: str, body: dict[str, Any]) -> None:
    def usages(**options: bool) -> list[Any]:
        asked = {**body, "stream": True, "stream_options": options}
        lines = answers(FakeEngine("One two three"), (path, asked))[0].text.splitlines()
        return [json.loads(line[6:]).get("usage") for line in lines if line.startswith("data: {")]

    *before, last = usages(include_usage=True, continuous_usage_stats=True)
    counts = [one["completion_tokens"] for one in before]
    assert len(before) > 3 and counts == sorted(counts) and counts[-1] == last["completion_tokens"] > 2
    assert {one["prompt_tokens"] for one in before} == {last["prompt_tokens"]}
    assert usages(include_usage=True)[:-1] == [None] * len(before) == usages(continuous_usage_stats=True)


def test_where_contexts_shift_a_prompt_may_be_longer() -> None:
    long = {"prompt": list(range(5, 3000)), "max_tokens": 9000}
    plain, shifting = FakeEngine(), FakeEngine(dropped=0)
    refused = answers(plain, ("/v1/completions", long))[0].json()["error"]
    assert refused["code"] == "context_length_exceeded"
    assert (refused["n_prompt_tokens"], refused["n_ctx"]) == (2995, plain.context_length)
    assert answers(shifting, ("/v1/completions", long), (CHAT, {"messages": HELLO}))[0].status_code == 200
    assert [request.max_tokens for request in shifting.asked] == [9000, shifting.context_length]


def test_the_newer_apis_count_fields_that_only_the_older_have() -> None:
    bodies = (("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": HELLO, "max_tokens": 5}))
    asked = [(path, {**body, "stop": [], "n": 1, "stream_options": {"include_usage": True}}) for path, body in bodies]
    *whole, metrics = answers(FakeEngine(), *asked, ("/metrics", None))
    assert [one.status_code for one in whole] == [200, 200]
    for path, _ in asked:
        for field in ("stop", "n", "stream_options"):
            assert f'mlcpipe_unknown_fields_total{{field="{field}",path="{path}"}} 1.0' in metrics.text


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize(
    "field",
    [
        '"metadata": {"a": 1e999}',
        '"tools": [{"type": "web_search", "a": 1e999}]',
        '"tool_choice": {"type": "allowed_tools", "tools": [], "a": -1e999}',
        '"tool_choice": {"type": "allowed_tools", "tools": 5}',
    ],
)
def test_what_cannot_be_said_again_is_refused_before_it_is_computed(field: str, stream: str) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, ("/v1/responses", f'{{"input": "a", "stream": {stream}, {field}}}'.encode()))
    assert (answer.status_code, engine.asked) == (400, [])
    assert answer.json()["error"]["message"]


def test_an_answer_that_a_stop_string_ends_is_no_cancelled_one() -> None:
    engine = FakeEngine("Hello there", ends=False)
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, "stop": "o t"}))
    choice = answer.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hell", "stop")
    assert engine.cancelled[0] == "stop"


def test_the_events_of_a_failed_stream_are_numbered_to_the_end() -> None:
    engine = FakeEngine("Hello there", fails=True)
    (answer,) = answers(engine, ("/v1/responses", {"input": "a", "stream": True}))
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.failed" and len(events) > 2
    assert [one["sequence_number"] for one in events] == list(range(len(events)))


def test_a_server_whose_engine_failed_is_not_well() -> None:
    engine = FakeEngine()
    engine.fault = "the engine failed: no pages"
    (health,) = answers(engine, ("/health", None))
    assert health.status_code == 503 and "no pages" in health.json()["error"]["message"]


def test_a_call_with_an_infinite_number_is_an_answer() -> None:
    engine = FakeEngine('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>')
    body = {"messages": HELLO, "max_tokens": 50, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    (answer,) = answers(engine, ("/v1/messages", body))
    assert answer.status_code == 200
    assert answer.json()["content"][0]["name"] == "f"


def test_long_names_of_fields_take_no_place() -> None:
    metrics = Metrics(EngineStats)
    metrics.count_unknown("/", (f"{'a' * 1000}{number}" for number in range(300)))
    metrics.count_unknown("/", ["b"])
    assert f'field="{"a" * 64}",path="/"}} 20.0' in metrics.text().decode()
    assert 'field="b",path="/"} 1.0' in metrics.text().decode()


def test_a_refused_request_is_counted_once_and_has_no_prompt() -> None:
    engine = FakeEngine(error=OverloadedError("64 requests are waiting already", 1.0))
    refused, metrics = answers(engine, (CHAT, {"messages": HELLO}), ("/metrics", None))
    lines = metrics.text.splitlines()
    assert refused.status_code == 503
    assert [line for line in lines if line.startswith("mlcpipe_rejected_requests_total")] == [
        'mlcpipe_rejected_requests_total{reason="overloaded"} 1.0'
    ]
    assert "mlcpipe_request_prompt_tokens_count 0.0" in lines


def test_a_client_that_leaves_is_not_refused() -> None:
    metrics = Metrics(EngineStats)
    metrics.count_rejected(ApiError(499, "the client closed the connection"))
    assert "mlcpipe_rejected_requests_total{" not in metrics.text().decode()


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def test_only_schemas_that_cannot_be_honoured_are_loosened_and_they_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    compiled: list[GrammarSource] = []
    compile_ = GrammarCompiler._compiled
    monkeypatch.setattr(
        GrammarCompiler, "_compiled", lambda self, source: (compiled.append(source), compile_(self, source))[1]
    )
    good, bad = tool("good", {"required": ["a"]}), tool("bad", {"unevaluatedItems": False})
    asked = [{"messages": HELLO, "tool_choice": "required", "tools": tools} for tools in ([good, bad], [bad, good])]
    assert [one.status_code for one in answers(FakeEngine(), *((CHAT, body) for body in asked))] == [200, 200]
    both, *alone, loosened, other_order = compiled
    assert len(alone) == 2 and "unevaluatedItems" in str(both.parts)
    for source in (loosened, other_order):
        assert "unevaluatedItems" not in str(source.parts) and '"required": ["a"]' in str(source.parts)


def test_an_origin_that_is_no_address_is_refused() -> None:
    (answer,) = answers(FakeEngine(), (CHAT, {"messages": HELLO}), headers={"origin": "http://["})
    assert answer.status_code == 403


def test_a_model_that_cannot_be_served_ends_the_server() -> None:
    loaded = Loaded(FakeEngine(), None, Facts(("demo",)))  # type: ignore[arg-type]
    with bound_socket("127.0.0.1", 0) as bound, pytest.raises(AttributeError):
        serve([bound], lambda: loaded, Rules(), lambda _: None, 1.0)
