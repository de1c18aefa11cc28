"""A conversation with a model that writes the harmony format, over OpenAI's API: thoughts, calls and answers are apart."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from tests.unit.server.fake_engine import FakeEngine, answers
from tests.unit.server.tools import HARMONY, WEATHER

THINKS = "<|channel|>analysis<|message|>Rome, they say.<|end|><|start|>assistant"
ANSWER = f"{THINKS}<|channel|>final<|message|>It is sunny."
CALL = f'{THINKS}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Rome"}}'
PATH = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "What is the weather?"}]}
TOOLS = {"tools": [WEATHER.described()]}


def engine(text: str, template: str = HARMONY) -> FakeEngine:
    made = FakeEngine(text)
    made.tokenizer.chat_templates["default"] = template  # its marks are text here
    made.tokenizer._compiled.clear()
    return made


@pytest.mark.parametrize("more", [{}, TOOLS], ids=["alone", "with tools"])
def test_an_answer_and_its_thoughts(more: dict[str, Any]) -> None:
    (response,) = answers(engine(ANSWER), (PATH, {**ASK, **more}))
    answer = response.json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == "Rome, they say."
    assert choice["message"]["content"] == "It is sunny." and not choice["message"].get("tool_calls")
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]


def test_an_effort_is_a_variable_of_the_template_and_another_template_is_refused() -> None:
    asked = engine(ANSWER, "{{- 'Reasoning: ' + (reasoning_effort or 'medium') }}" + HARMONY)
    plain, input_ = {"reasoning_effort": "high"}, {"input": ASK["messages"], "reasoning": {"effort": "high"}}
    ways: list[tuple[str, dict[str, Any]]] = [
        (PATH, {**ASK, **plain}), ("/v1/responses", input_), ("/apply-template", {**ASK, **plain}),
        ("/v1/messages", {**ASK, "max_tokens": 9, "output_config": {"effort": "high"}}),
        ("/tokenize", {**ASK, "reasoning": {"effort": "high"}}),
    ]  # fmt: skip
    found = answers(asked, *ways)
    assert [one.status_code for one in found] == [200] * 5
    told = [*(one.tokens for one in asked.asked), found[4].json()["tokens"]]
    prompts = [*map(asked.tokenizer.decode, told), found[2].json()["prompt"]]
    assert len(prompts) == 5 and all("Reasoning: high" in one and "weather?" in one for one in prompts)
    wrong = [(path, json.loads(json.dumps(body).replace('"high"', '"huge"'))) for path, body in ways]
    for one in answers(asked, *wrong):
        assert one.status_code == 400 and "effort: expected one of" in one.text
    refused = answers(asked, *((path, {**body, "chat_template": "a"}) for path, body in ways))
    assert {one.status_code for one in refused} == {400} and all("chat_template: not" in one.text for one in refused)


def test_a_call_as_it_comes() -> None:
    asked = engine(CALL)
    (response,) = answers(asked, (PATH, {**ASK, **TOOLS, "tool_choice": "required", "stream": True}))
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Rome, they say."
    assert not any(delta.get("content") for delta in deltas)
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert calls[0]["name"] == "weather" and len(calls) > 2
    assert json.loads("".join(call.get("arguments") or "" for call in calls)) == {"city": "Rome"}
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert asked.asked[0].grammar is not None


def test_a_result_goes_back_into_the_prompt() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    said = {"role": "assistant", "content": None, "reasoning_content": "Rome.", "tool_calls": [call]}
    messages = [*ASK["messages"], said, {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    asked = engine(ANSWER)
    (response,) = answers(asked, (PATH, {**ASK, **TOOLS, "messages": messages}))
    assert response.status_code == 200, response.text
    prompt = asked.tokenizer.decode(asked.asked[0].tokens)
    assert "<|channel|>analysis<|message|>Rome.<|end|>" in prompt
    assert 'to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>' in prompt
    assert prompt.endswith("<|message|>sunny<|end|><|start|>assistant")


@pytest.mark.parametrize(("path", "more"), [("/v1/messages", {"max_tokens": 50}), ("/api/chat", {"stream": False})])
def test_an_answer_on_channels_begins_behind_one_that_was_begun(path: str, more: dict[str, Any]) -> None:
    begun = [*ASK["messages"], {"role": "assistant", "content": "It"}]
    (response,) = answers(engine(ANSWER), (path, {"model": "demo", "messages": begun, **more}))
    assert response.status_code == 200 and "It is sunny." in response.text
