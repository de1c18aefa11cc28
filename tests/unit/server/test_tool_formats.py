"""Every style of tool calls: found from the template, and read from a stream of any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.tool_formats import format_for, format_of
from mlcpipe.runtime.tool_formats.style import Thought
from tests.unit.server import tools
from tests.unit.server.tools import BY_NAME, NEXT, THINKS, joined, read

JSON = '{"name": "weather", "arguments": {"city": "Pa\\"r}is", "days": [1, {"a": "\\\\"}]}}'
ARGUMENTS = {"city": 'Pa"r}is', "days": [1, {"a": "\\"}]}
CALL = ("weather", ARGUMENTS)
# style, text, the text and the calls that are in it
CASES = [
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call>", "", [CALL]),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>{JSON}</tool_call>\n<tool_call>\n{JSON}\n</tool_call>",
        "Let me see.",
        [CALL, CALL],
    ),
    ("hermes", f"<tool_call>{JSON.replace('arguments', 'parameters')}</tool_call>", "", [CALL]),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>', "", [("clock", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", [("clock", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("clock", {"a": 1})]),
    ("hermes", '<tool_call>{"id": 3, "name": "clock", "x": null, "arguments": {}}</tool_call>', "", [("clock", {})]),
    ("hermes", "1 < 2 and <tool_cal> is none", "1 < 2 and <tool_cal> is none", []),
    ("hermes", "<tool_call>[1]</tool_call>", "[1]</tool_call>", []),
    ("hermes", '<tool_call>{"no": 1}', '{"no": 1}', []),
    ("generic", f"Yes. <tool_call>{JSON}</tool_call>", "Yes.", [CALL]),
    ("llama3_json", JSON.replace("arguments", "parameters"), "", [CALL]),
    ("llama3_json", f"<|python_tag|>{JSON}; {JSON}", "", [CALL, CALL]),
    ("llama3_json", 'A brace: {"name": 1}', 'A brace: {"name": 1}', []),
    ("llama3_json", '{"a": 1}', '{"a": 1}', []),
    ("llama3_json", '{"name": "Bob", "parameters": {"a": 1}}', '{"name": "Bob", "parameters": {"a": 1}}', []),
    ("mistral", f"[TOOL_CALLS] [{JSON}]", "", [CALL]),
    ("mistral", f"Well. [TOOL_CALLS][{JSON}, {JSON}]", "Well.", [CALL, CALL]),
    ("mistral", "[TOOL] is a word", "[TOOL] is a word", []),
    (
        "qwen3_xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("weather", {"city": "12", "days": 3})],
    ),
    ("qwen3_xml", "a<tool_call>\n<function=clock>\n</function>\n</tool_call>b", "ab", [("clock", {})]),
    ("qwen3_xml", "<tool_call>what</tool_call>", "<tool_call>what</tool_call>", []),
    (
        "qwen3_xml",
        "<tool_call>\n<function=weather>\n<parameter=days>\n"
        '{"a": "</tool_call>", "b": "</parameter>"}\n</parameter>\n</function>\n</tool_call>.',
        ".",
        [("weather", {"days": {"a": "</tool_call>", "b": "</parameter>"}})],
    ),
]


CALLS = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
# text; thoughts, text and calls that are in it
MESSAGES = [
    (f"{THINKS}{NEXT}<|channel|>final<|message|>Sun.<|return|>", "Rome, they say.", "Sun.", []),
    (f"{THINKS}{NEXT}<|channel|>final<|message|>Sun.", "Rome, they say.", "Sun.", []),
    (f"{THINKS}{NEXT}{CALLS}", "Rome, they say.", "", [CALL]),
    (f"{THINKS}{NEXT}{CALLS.removesuffix('<|call|>')}", "Rome, they say.", "", [CALL]),
    (f"{THINKS}{NEXT}{THINKS}{NEXT}{CALLS}", "Rome, they say.\n\nRome, they say.", "", [CALL]),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALLS}", "", "I look.", [CALL]),
    (f" to=functions.weather<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|>", "", "", [CALL]),
    ("<|channel|>commentary to=functions.clock<|message|><|call|>", "", "", [("clock", {})]),
    ("<|channel|>analysis to=python<|message|>1 + 1<|call|>", "1 + 1", "", []),
    (f"<|channel|>commentary<|message|>One.<|end|>{NEXT}<|channel|>final<|message|>Two.", "", "One.\n\nTwo.", []),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "", "{}", []),
    ("<|channel|>analysis<|message|>1 <|end of", "1 <|end of", "", []),
    ("Plain words.", "", "Plain words.", []),
    ("to be", "", "to be", []),
    ("to", "", "to", []),
    ("<|channel|>anal", "", "", []),
    ("", "", "", []),
]


@pytest.mark.parametrize(("text", "thoughts", "shown", "calls"), MESSAGES, ids=range(len(MESSAGES)))
def test_channels_are_read_in_pieces_of_any_size(text: str, thoughts: str, shown: str, calls: list[Any]) -> None:
    for size in (1, 2, 3, 7, len(text) or 1):
        parser = BY_NAME["harmony"].parser([tools.WEATHER, tools.CLOCK])
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        found = [*(one for piece in pieces for one in parser.push(piece)), *parser.finish()]
        assert "".join(one.text for one in found if isinstance(one, Thought)) == thoughts, size
        assert joined(found) == (shown, calls), size


def test_a_call_is_text_where_there_are_no_tools() -> None:
    parser = BY_NAME["harmony"].parser([])
    assert joined([*parser.push(CALLS), *parser.finish()]) == (json.dumps(ARGUMENTS), [])


def test_a_header_without_an_end_is_text_and_takes_no_more_memory() -> None:
    parser = BY_NAME["harmony"].parser([])
    text = "<|channel|>" + "a" * 5000
    assert joined([one for char in text for one in parser.push(char)])[0] == text


def test_harmony_has_one_call_a_message_and_its_result_next() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}

    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "Two.", "tool_calls": [call("x"), call("y")]},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "user", "content": "And?"},
    ]
    prepared, _ = BY_NAME["harmony"].prepare(messages, [])
    assert ChatTemplate(tools.HARMONY).render(prepared, add_generation_prompt=True) == (
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Two.\n\nLook.<|end|>"
        '<|start|>assistant to=functions.x<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.x to=assistant<|channel|>commentary<|message|>1<|end|>"
        '<|start|>assistant to=functions.y<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>functions.y to=assistant<|channel|>commentary<|message|>2<|end|>"
        "<|start|>user<|message|>And?<|end|><|start|>assistant"
    )


@pytest.mark.parametrize(("style", "text", "shown", "calls"), CASES, ids=range(len(CASES)))
def test_calls_are_read_whole_and_in_pieces_of_any_size(style: str, text: str, shown: str, calls: list[Any]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
        assert read(BY_NAME[style].parser([tools.WEATHER, tools.CLOCK]), pieces) == (shown, calls), size


def test_a_call_that_is_cut_off_keeps_what_came() -> None:
    parser = BY_NAME["hermes"].parser([])
    found = parser.push('<tool_call>{"name": "weather", "arguments": {"city": "Par')
    assert isinstance(found[0], CallPiece)
    assert (found[0].name, found[0].arguments) == ("weather", '{"city": "Par')
    assert parser.finish() == []


def test_arguments_come_as_they_are_written() -> None:
    parser = BY_NAME["hermes"].parser([])
    counts = [len(parser.push(char)) for char in f"<tool_call>{JSON}</tool_call>"]
    assert sum(counts) > 30


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (tools.HERMES, "hermes"),
        (tools.QWEN3_XML, "qwen3_xml"),
        (tools.LLAMA3, "llama3_json"),
        (tools.MISTRAL, "mistral"),
        (tools.HARMONY, "harmony"),
        (tools.PLAIN, "generic"),
        (None, "generic"),
    ],
)
def test_the_template_tells_the_style(template: str | None, name: str) -> None:
    assert format_of(template).name == name


def test_the_template_for_tools_tells_the_style() -> None:
    hermes, unknown = "{{ tools }}<tool_call>", "{{ messages }}"
    names = [
        format_for(templates).name for templates in ({}, {"default": hermes}, {"default": unknown, "tool_use": hermes})
    ]
    assert names == ["generic", "hermes", "hermes"]
    assert format_for({"default": hermes, "tool_use": unknown}).name == "hermes"  # it writes the tools at least


def test_templates_without_tools_are_told_of_them_in_words() -> None:
    generic = BY_NAME["generic"]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    made, extras = generic.prepare(messages, [tools.WEATHER])
    assert extras == {}
    assert [one["role"] for one in made] == ["system", "user", "assistant", "user"]
    assert "Tells the weather" in made[0]["content"]
    assert read(generic.parser([]), [made[2]["content"]]) == ("", [("weather", {"city": "Rome"})])
    assert "sunny" in made[3]["content"]


def test_mistral_s_ids_have_nine_characters() -> None:
    style = BY_NAME["mistral"]
    call = {"id": "call_0123456789abc", "type": "function", "function": {"name": "f", "arguments": {}}}
    made, _ = style.prepare([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": ""}], [])  # fmt: skip
    assert made[0]["tool_calls"][0]["id"] == made[1]["tool_call_id"] == "456789abc"
    found = style.parser([]).push(f"[TOOL_CALLS][{JSON}]")
    assert [len(one.id) for one in found if isinstance(one, CallPiece) and one.name] == [9]
