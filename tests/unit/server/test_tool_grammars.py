"""The grammar of each style of tool calls: what it allows, the parser of the style reads back."""

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
from mlcpipe.runtime.text.harmony import MARKS
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats import FORMATS
from mlcpipe.runtime.tool_formats.style import Tool, ToolFormat
from tests.conftest import DEMO
from tests.unit.server import tools
from tests.unit.server.tools import BY_NAME, NEXT, THINKS, read

ROWS = 3115  # of logits: 43 more than the demo model's tokenizer has tokens


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
