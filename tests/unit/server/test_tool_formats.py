"""Every style of tool calls: found from the template, read from a stream of any pieces, and its own grammar is read back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.harmony import MARKS
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.tool_formats import FORMATS, format_for, format_of
from mlcpipe.server.tool_formats.style import CallPiece, Thought, Tool, ToolFormat, ToolParser
from tests.conftest import DEMO
from tests.unit.server import tools

BY_NAME = {one.name: one for one in FORMATS}
ROWS = 3115  # of logits: 43 more than the demo model's tokenizer has tokens
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


THINKS = "<|channel|>analysis<|message|>Rome, they say.<|end|>"
CALLS = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
NEXT = "<|start|>assistant"
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


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    return joined([*(one for piece in pieces for one in parser.push(piece)), *parser.finish()])


def joined(pieces: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    text, calls = "", list[list[str]]()
    for found in pieces:
        if isinstance(found, Thought):
            continue
        if isinstance(found, str):
            text += found
        elif found.name is not None:
            assert (found.index, bool(found.id)) == (len(calls), True)
            calls.append([found.name, found.arguments])
        else:
            calls[found.index][1] += found.arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


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


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = json.loads((DEMO / "config.json").read_text())
    return Tokenizer.load(Path(DEMO), generation_config={}, config=config)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, ROWS)


def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer, source: Any, text: str | list[int]) -> bool:
    """Whether a text may be written token by token, and may end then."""
    matcher = compiler.compile(source).matcher()
    words = np.zeros(-(-ROWS // 32), np.int32)
    for token in tokenizer.encode(text) if isinstance(text, str) else text:
        matcher.fill(words)
        if not words[token // 32] >> (token % 32) & 1:
            return False
        matcher.accept(token)
    matcher.fill(words)
    return matcher.ended or any(words[token // 32] >> (token % 32) & 1 for token in tokenizer.eos_token_ids)


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>"
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
FORCED = {
    "hermes": f"<tool_call>\n{ROME}\n</tool_call>",
    "generic": f"<tool_call>{ROME}</tool_call>",
    "llama3_json": ROME.replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS] [{ROME}]",
    "qwen3_xml": XML,
    "harmony": f'{THINKS}{NEXT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Rome"}}',
}


@pytest.mark.parametrize("style", FORMATS, ids=lambda one: one.name)
def test_a_forced_grammar_allows_what_the_parser_reads_and_nothing_else(
    style: ToolFormat, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    source = style.grammar([tools.WEATHER, tools.CLOCK], json.dumps, forced=True, parallel=False)
    text = FORCED[style.name]
    assert accepts(compiler, tokenizer, source, text)
    assert read(style.parser([tools.WEATHER]), [text]) == ("", [("weather", {"city": "Rome"})])
    for wrong in (text.replace("weather", "wether"), text.replace("city", "town"), f"Well: {text}", text[:-2]):
        assert not accepts(compiler, tokenizer, source, wrong), wrong


def called(style: str, arguments: dict[str, Any]) -> str:
    """A call of `f` as a style writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if style == "qwen3_xml":
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    return FORCED[style].replace("weather", "f").replace('{"city": "Rome"}', text)


def an_object(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


CLOSED = {"additionalProperties": False}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
NAMED = {"$defs": {"A": {"enum": ["x", "y"]}, "B": {**an_object(["a"], a={"$ref": "#/$defs/A"}), **CLOSED}}}
# parameters of a tool, arguments that fit them, and others that do not
FITS: Mapping[str, tuple[Any, list[Any], list[Any]]] = {
    "required": (
        an_object(["city", "days"], city=TEXT, days=INTEGER) | CLOSED,
        [{"city": "Rome", "days": 2}, {"city": "", "days": -7}],
        [{}, {"city": "Rome"}, {"days": 2}, {"city": "Rome", "days": "two"}, {"city": "Rome", "days": 2, "more": 1}],
    ),
    "optional": (an_object(["b"], a=INTEGER, b=TEXT) | CLOSED, [{"b": "c"}, {"a": 1, "b": "c"}], [{"a": 1}, {"a": "x", "b": "c"}]),
    "values": (
        an_object(["u", "n", "c"], u={"enum": ["km", "mi"]}, n={"enum": [1, None]}, c={"const": "é b"}),
        [{"u": "mi", "n": None, "c": "é b"}],
        [{"u": "m", "n": 1, "c": "é b"}, {"u": "km", "n": 2, "c": "é b"}, {"u": "km", "n": 1, "c": "b"}],
    ),
    "nested": (
        an_object(["o"], o=an_object(["p"], p={"type": "array", "items": INTEGER, "maxItems": 2}) | CLOSED),
        [{"o": {"p": [1, 2]}}, {"o": {"p": []}}],
        [{"o": {}}, {"o": {"p": ["1"]}}, {"o": {"p": [1, 2, 3]}}, {"o": {"p": [1], "q": 1}}, {"o": [1]}],
    ),
    "references": (
        {**NAMED, **an_object(["a", "b"], a={"$ref": "#/$defs/A"}, b={"$ref": "#/$defs/B"})},
        [{"a": "x", "b": {"a": "y"}}],
        [{"a": "z", "b": {"a": "y"}}, {"a": "x", "b": {"a": "z"}}, {"a": "x", "b": {}}],
    ),
    "a reference": ({"$defs": {"A": an_object(["a"], a=INTEGER) | CLOSED}, "$ref": "#/$defs/A"}, [{"a": 1}], [{}, {"a": "b"}]),
    "nothing or a value": (
        an_object(["s", "n"], s={"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, n={"type": ["number", "null"]}),
        [{"s": "a", "n": 1.5}, {"s": None, "n": None}],
        [{"s": "c", "n": 1}, {"s": 5, "n": 1}, {"s": "a", "n": "b"}],
    ),
    "alternatives": (
        {"anyOf": [an_object(["a"], a=INTEGER) | CLOSED, an_object(["b"], b={"type": "boolean"}) | CLOSED]},
        [{"a": 1}, {"b": True}],
        [{}, {"a": True}, {"b": 1}, {"a": 1, "b": True}],
    ),
    "texts": (
        an_object(["p", "s"], p={"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}, s={"type": "string", "maxLength": 3}),
        [{"p": "AB-1", "s": "a/b"}],
        [{"p": "ab-1", "s": ""}, {"p": "AB-", "s": ""}, {"p": "AB-1", "s": "abcd"}],
    ),
    "texts in and beside values": (
        an_object(["p", "t", "n"], p={"type": "string", "pattern": "[ab]\\$"}, t={"enum": ["x", "</parameter>", "5", 5]},
                  n={"anyOf": [TEXT, {"type": "integer", "maximum": 5}]}) | CLOSED,
        [{"p": "1a$", "t": "x", "n": "6"}, {"p": "b$", "t": 5, "n": 5}, {"p": "b$", "t": "x", "n": "<p>\n"}],
        [{"p": "a", "t": "x", "n": ""}, {"p": "a$", "t": "y", "n": ""}],
    ),
    "required alone": (an_object(["a", "b"], a=INTEGER), [{"a": 1, "b": 2}, {"a": 1, "b": "c"}], [{"a": 1}]),
    "of both": (
        {"allOf": [an_object(["a"], a={"enum": ["x", "y"]}), an_object(["a"], a={"enum": ["y", "z"]})]},
        [{"a": "y"}],
        [{"a": "x"}, {"a": "z"}, {}],
    ),
    "more": (
        an_object(["a"], a=INTEGER) | {"additionalProperties": {"type": "boolean"}},
        [{"a": 1}, {"a": 1, "b": True}],
        [{"b": True}, {"a": 1, "b": 2}],
    ),
    "no parameters": (an_object(), [{}], [{"a": 1}]),
    "no type": ({"properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}, {"a": "b"}]),
    "anything": ({"type": "object"}, [{}, {"a": 1, "b": "c"}], []),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
@pytest.mark.parametrize("style", FORMATS, ids=lambda one: one.name)
def test_calls_fit_the_schema(style: ToolFormat, case: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Forced or not, and they are read as what they were written from."""
    parameters, good, bad = FITS[case]
    tool = Tool("f", "", parameters, strict=True)
    for forced in (True, False):
        source = style.grammar([tool], json.dumps, forced=forced, parallel=False)
        for arguments in good:
            text = called(style.name, arguments)
            assert accepts(compiler, tokenizer, source, text), text
            assert read(style.parser([tool]), [text]) == ("", [("f", arguments)])
        for arguments in bad:
            assert not accepts(compiler, tokenizer, source, called(style.name, arguments)), arguments


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "5", "5"),
        (TEXT, '"a"', '"a"'),
        (INTEGER, " 12345678901234567890 ", 12345678901234567890),
        (INTEGER, "five", "five"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"anyOf": [TEXT, {"type": "array"}]}, "[1]", [1]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"type": ["string", "integer"], "minimum": 3}, "1", "1"),
        ({"type": ["string", {}]}, "5", "5"),
        ({"type": "number"}, "NaN", "NaN"),
        ({}, "NaN", "NaN"),
        ({}, "true", True),
        ({}, "a\nb", "a\nb"),
    ],
)
def test_the_schema_tells_texts_from_other_values(schema: Any, text: str, value: Any) -> None:
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert read(BY_NAME["qwen3_xml"].parser([Tool("f", "", an_object(a=schema))]), [call]) == (
        "",
        [("f", {"a": value})],
    )


@pytest.mark.parametrize("schema", [{"patternProperties": {}}, an_object(a={"type": "string", "format": "date"})])
def test_a_strict_tool_of_texts_in_tags_says_nothing_that_is_not_known(schema: Any) -> None:
    style = BY_NAME["qwen3_xml"]
    assert style.grammar([Tool("f", "", schema)], json.dumps, forced=True, parallel=False)
    with pytest.raises(UsageError, match="strict tool f"):
        style.grammar([Tool("f", "", schema, strict=True)], json.dumps, forced=True, parallel=False)


@pytest.mark.parametrize(
    "kind", ["", " ", " json", "<|constrain|>json", " <|constrain|>json", "json", " <|constrain|>"]
)
def test_a_call_s_kind_is_no_part_of_its_name(kind: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    style, text = BY_NAME["harmony"], f"<|channel|>commentary to=functions.clock{kind}<|message|>{{}}"
    source = style.grammar([tools.CLOCK], json.dumps, forced=True, parallel=False)
    assert accepts(compiler, tokenizer, source, text) == (kind not in ("json", " <|constrain|>"))
    if kind != "json":
        assert read(style.parser([tools.CLOCK]), [text])[1] == [("clock", {})]


def test_text_without_marks_may_begin_with_a_brace_unless_a_tool_is_strict(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    style, call = BY_NAME["llama3_json"], FORCED["llama3_json"]
    assert style.grammar([tools.WEATHER], json.dumps, forced=False, parallel=True) is None
    tagged = style.grammar([tools.WEATHER], lambda text: "<[1]>", forced=False, parallel=True)
    wrong = call.replace("city", "town")
    for text, fits in (
        (tokenizer.encode(wrong), True),
        ([1, *tokenizer.encode(call)], True),
        ([1, *tokenizer.encode(wrong)], False),
    ):
        assert accepts(compiler, tokenizer, tagged, text) == fits
    strict = style.grammar([replace(tools.WEATHER, strict=True)], json.dumps, forced=False, parallel=True)
    for text, fits in (
        (call, True),
        (f"{call}; {call}", True),
        ("Sun. {}", True),
        ("", True),
        (wrong, False),
        ("{}", False),
    ):
        assert accepts(compiler, tokenizer, strict, text) == fits, text


def test_references_inside_a_tool_s_schema_are_followed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}}
    places = [Tool(name, "", {**parameters, "$defs": {"City": {"const": name}}}) for name in ("Rome", "Oslo")]
    source = BY_NAME["llama3_json"].grammar(places, json.dumps, forced=True, parallel=False)
    for name, city in (("Rome", "Rome"), ("Rome", "Oslo"), ("Oslo", "Oslo")):
        text = f'{{"name": "{name}", "parameters": {{"city": "{city}"}}}}'
        assert accepts(compiler, tokenizer, source, text) == (name == city)


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_markers_may_be_control_tokens(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Here tokens 1 and 0, which no text becomes, stand for them."""
    style, encode = BY_NAME[name], tokenizer.encode

    def literal(text: str) -> str:
        return {"<tool_call>": "<[1]>", "[TOOL_CALLS]": "<[1]>", "</tool_call>": "<[0]>"}.get(text) or json.dumps(text)

    call = [1, *encode(ROME), 0] if name == "hermes" else [1, *encode(f" [{ROME}]")]
    for forced in (True, False):
        source = style.grammar([tools.WEATHER], literal, forced=forced, parallel=True)
        assert accepts(compiler, tokenizer, source, call)
        assert accepts(compiler, tokenizer, source, [*encode("Well:"), *call]) is not forced
        assert accepts(compiler, tokenizer, source, "Well.") is not forced
        assert not accepts(compiler, tokenizer, source, [1, *encode("Well")])
        single = style.grammar([tools.WEATHER], literal, forced=forced, parallel=False)
        assert accepts(compiler, tokenizer, single, call)
        assert not accepts(compiler, tokenizer, single, call + call)


@pytest.mark.parametrize("control", [False, True])
def test_channels_come_before_an_answer_and_before_a_call(
    control: bool, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """As text, and as control tokens, for which tokens 0 to 6 stand that no text of the test has."""
    style, marks = BY_NAME["harmony"], {mark: index for index, mark in enumerate(MARKS)}

    def literal(text: str) -> str:
        return f"<[{marks[text]}]>" if control else json.dumps(text)

    def encoded(text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, MARKS))})", text) if control else [text]
        return [
            token
            for part in parts
            for token in ([marks[part]] if part in marks and control else tokenizer.encode(part))
        ]

    call = FORCED["harmony"]
    final = f"{THINKS}{NEXT}<|channel|>final<|message|>"
    tools_of = style.grammar([tools.WEATHER], literal, forced=False, parallel=True)
    form = GrammarSource("json_schema", '{"const": 7}', before=style.before_answer(literal))
    for source, good, bad in (
        (
            tools_of,
            [call, f"{final}Sun.", f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{call}"],
            ["Sun.", f"{call} "],
        ),
        (form, [f"{final}7", "<|channel|>final <|constrain|>json<|message|>7"], [f"{final}8", "7", THINKS]),
    ):
        for text in good:
            assert accepts(compiler, tokenizer, source, encoded(text)), text
        for text in bad:
            assert not accepts(compiler, tokenizer, source, encoded(text)), text


@pytest.mark.parametrize("name", ["hermes", "generic", "qwen3_xml"])
def test_where_calls_are_free_text_is_too_until_one_begins(
    name: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    source = BY_NAME[name].grammar([tools.WEATHER], json.dumps, forced=False, parallel=True)
    good = FORCED[name]
    for text in ("Hello <b>.", good, f"Well: {good}", f"{good}\n{good}"):
        assert accepts(compiler, tokenizer, source, text), text
    for text in (good.replace("weather", "wether"), good.replace("city", "town"), "a <tool_call>b"):
        assert not accepts(compiler, tokenizer, source, text), text


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
