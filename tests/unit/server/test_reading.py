"""Reasoning apart from answers, messages as templates take them, bodies as they must be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from mlcpipe.errors import UsageError
from mlcpipe.runtime.answer_reader import AnswerReader, CallingText, Reading
from mlcpipe.runtime.sampling_params import ToolCall, add_pieces
from mlcpipe.runtime.serving.grammar import Thinking
from mlcpipe.runtime.text.reasoning import ReasoningSplitter
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats import format_of
from mlcpipe.runtime.tools import with_arguments
from mlcpipe.server.bodies import CompletionFields, SamplingFields
from mlcpipe.server.errors import ApiError
from mlcpipe.server.prompts import plain_messages, render, without_billing
from tests.conftest import DEMO
from tests.unit.server import tools


@pytest.mark.parametrize(
    ("text", "open_", "reasoning", "answer"),
    [
        ("<think>\nhm < 2\n</think>\n\nYes.", False, "hm < 2", "Yes."),
        ("\n<think></think>Yes", False, "", "Yes"),
        ("hm</think>\nYes </think>", True, "hm", "Yes </think>"),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<thin", False, "", "<thin"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("cut", True, "cut", ""),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, open_: bool, reasoning: str, answer: str) -> None:
    for size in (1, 2, 5, 100):
        splitter = ReasoningSplitter(open=open_)
        parts = [splitter.push(text[begin : begin + size]) for begin in range(0, len(text), size)]
        parts.append(splitter.finish())
        assert ("".join(one for one, _ in parts), "".join(one for _, one in parts)) == (reasoning, answer), size


@pytest.mark.parametrize(
    ("thinking", "written", "shown"),
    [
        ("none", "", ""),
        ("may", "<think>\nhm </think>\n", "<think>\nhm\n</think>\n\n"),
        ("may", "<think>hm", "<think>\nhm"),
        ("open", "hm</think>", "hm\n</think>\n\n"),
    ],
)
def test_python_gets_thoughts_in_the_text_and_calls_apart(thinking: Thinking, written: str, shown: str) -> None:
    tokenizer = Tokenizer.load(Path(DEMO), generation_config={}, config=json.loads((DEMO / "config.json").read_text()))
    ends = not shown.endswith("hm")
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>' if ends else ""
    style = format_of(tools.HERMES)
    reader = AnswerReader(tokenizer, Reading(thinking=thinking, style=style, tools=[tools.CLOCK], one_call=True), ())
    text, calls = CallingText(reader, opened=thinking == "open"), list[ToolCall]()
    assert "".join(map(text.push, tokenizer.encode(written + call * 2))) + text.flush() == shown
    add_pieces(calls, text.take_calls())
    assert [one[1:] for one in calls] == [("clock", "{}")] * ends
    assert [text.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls" if ends else "stop", "length"]


def test_messages_become_what_templates_take() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made = plain_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "system", "content": "c"},
            {"role": "user", "content": "d", "field_of_tomorrow": 1},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "e"},
        ]
    )
    assert made == [
        {"role": "system", "content": "a\nb\n\nc"},
        {"role": "user", "content": "d"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "e"},
    ]
    assert with_arguments(made[2])["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": 3},
        {"role": "user", "content": 3},
        {"role": "user", "content": [3]},
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        {"role": "user", "content": {"type": "text"}},
        {"role": "assistant", "tool_calls": [3]},
        {"role": "assistant", "tool_calls": [{"function": {"name": 3}}]},
        {"role": "assistant", "tool_calls": {"a": 1}},
    ],
)
def test_messages_of_another_form_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises((ApiError, UsageError), match=r"messages\[0\]"):
        plain_messages([message])


def test_the_line_that_changes_is_dropped() -> None:
    assert without_billing(["x-anthropic-billing-header: cch=1;", "You are"]) == ["You are"]


def test_templates_get_tools_and_tell_whether_an_answer_begins_with_reasoning() -> None:
    tokenizer = Tokenizer.load(Path(DEMO), generation_config={}, config=json.loads((DEMO / "config.json").read_text()))
    user = [{"role": "user", "content": "hi"}]
    thinking = tools.HERMES + "{%- if enable_thinking %}<think>\n{% endif %}{#</think>#}"
    granite = thinking.replace("enable_thinking", "thinking")
    for template, variables, expected in (
        (tools.HERMES, {}, "none"),
        (granite, {"enable_thinking": True}, "open"),
        (granite, {"enable_thinking": True, "thinking": False}, "may"),
        (thinking, {"enable_thinking": True, "self": 1, "marks": 2, "given": 3}, "open"),
        (thinking, {}, "may"),
    ):
        tokenizer.chat_templates["default"] = template
        tokenizer._compiled.clear()
        prompt = render(tokenizer, user, [tools.WEATHER], format_of(template), variables)
        assert prompt.thinking == expected
        assert "Tells the weather" in tokenizer.decode(prompt.tokens)
    with pytest.raises(Exception, match="chat_template_kwargs"):
        render(tokenizer, user, [], format_of(thinking), {"messages": []})


@pytest.mark.parametrize(
    "text",
    ['{"seed": "one"}', '{"seed": "1.5"}', '{"seed": 1.5}', '{"top_k": "1e999"}', '{"temperature": ""}', '{"temperature": true}', '{"top_p": NaN}', '{"n": 65}', '{"stop": [1]}', '{"stream": "yes"}', '{"temperature": 1e999}', "[]", "null", '{"a": "\\udc00"}', '{"a": 1', "\x00"],
)  # fmt: skip
def test_bodies_have_exactly_their_types(text: str) -> None:
    with pytest.raises(ValidationError):
        CompletionFields.model_validate_json(text)
    assert SamplingFields.model_validate_json('{"temperature": 1, "tomorrow": 2}').model_extra == {"tomorrow": 2}
