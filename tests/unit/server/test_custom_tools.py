"""OpenAI's custom tools: calls in every style, and through its own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

llguidance = pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")  # which it takes
pytest.importorskip("fastapi")

from mlcpipe.runtime.answer_reader import AnswerReader, Reading
from mlcpipe.runtime.custom_tools import InputReader
from mlcpipe.runtime.sampling_params import CallPiece, CustomToolCall, ToolCall, add_pieces
from mlcpipe.runtime.tool_calling import ToolCalling
from mlcpipe.runtime.tools import choice_of
from mlcpipe.server.app import create_app
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.service import Facts, Service
from tests.unit.server.fake_engine import FakeEngine, answers
from tests.unit.server.tools import BY_NAME, PATCH_GRAMMAR, PATCHES

_T = TypeVar("_T")
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK = [{"role": "user", "content": "Change a.py"}]
LARK = {"syntax": "lark", "definition": PATCH_GRAMMAR}
PATCH = {"name": "apply_patch", "description": "Edits files"}
CHAT_PATCH = {"type": "custom", "custom": {**PATCH, "format": {"type": "grammar", "grammar": LARK}}}
FLAT_PATCH = {"type": "custom", **PATCH, "format": {"type": "grammar", **LARK}}
LINES = {"type": "grammar", "grammar": {"syntax": "regex", "definition": '[a-z]+\\n|"'}}
CHAT_LINES = {"type": "custom", "custom": {"name": "lines", "format": LINES}}
SHELL = {"type": "function", "function": {"name": "shell", "parameters": {"properties": {"a": {"type": "string"}}}}}
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
    "generic": '<tool_call>{"name": "%s", "arguments":%s}</tool_call>',
    "llama3_json": '{"name": "%s", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "%s", "arguments": %s}]',
    "harmony": "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    "qwen3_xml": "<tool_call>\n<function=%s>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>",
}


def written(style: str, name: str, text: str) -> str:
    """A call as a model of this style writes it."""
    arguments = text if style == "qwen3_xml" else json.dumps({"input": text}, ensure_ascii=False)
    return WRITTEN[style] % (name, arguments)


@pytest.mark.parametrize("style", WRITTEN)
def test_every_style_holds_inputs_to_their_grammar_and_reads_them(style: str) -> None:
    engine = FakeEngine()
    calling = ToolCalling(engine.tokenizer, engine.vocab_size)
    calling.style = BY_NAME[style]
    choice = choice_of([CHAT_PATCH, SHELL, CHAT_LINES], "required", parallel=False)
    grammar = calling.grammar(choice, None, "none")
    assert grammar is not None
    for name, text, fits in (
        ("apply_patch", PATCHES[0], True), ("apply_patch", PATCHES[1], True), ("apply_patch", "*** Begin", False),
        ("lines", "ab\n", True), ("lines", '"', True), ("lines", "ab", False),
    ):  # fmt: skip
        whole = written(style, name, text)
        tokens = engine.tokenizer.encode(whole)
        matcher = grammar.matcher()._matcher
        assert (matcher.consume_tokens(tokens) and matcher.is_accepting()) is fits, (name, text)
        reader = AnswerReader(engine.tokenizer, Reading(style=BY_NAME[style], tools=choice.tools), ())
        calls: list[ToolCall] = []
        for index, token in enumerate(tokens):
            add_pieces(calls, reader.read(token, last=index + 1 == len(tokens)).calls)
        assert [(type(call), call.name, call.arguments) for call in calls] == [(CustomToolCall, name, text)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\n\\"\\\\\\u00e9\\ud83d\\ude00"}', 'a\n"\\é\U0001f600'),
        ('{ "input":"" }', ""),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "wrong \\q', "wrong \\q"),
        ('{"other": 1}', '{"other": 1}'),
        ("plain", "plain"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_an_input_is_read_from_any_pieces(arguments: str, expected: str, size: int) -> None:
    reader, calls = InputReader({"t"}), list[ToolCall]()
    parts = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    pieces = [CallPiece(0, "c", "t"), *(CallPiece(0, arguments=part) for part in parts), CallPiece(1, "d", "f", "{}")]
    for piece in pieces:
        add_pieces(calls, reader.push([piece]))
    assert not reader.finish()
    assert calls == [CustomToolCall("c", "t", expected), ToolCall("d", "f", "{}")]
    assert [type(call) for call in calls] == [CustomToolCall, ToolCall]


def with_openai(engine: FakeEngine, work: Callable[[Any], Awaitable[_T]]) -> _T:
    """The result of `work` with OpenAI's client."""

    async def run() -> _T:
        app, guard = create_app()
        app.state.pool = pool = ModelPool.of(Service(engine, engine.tokenizer, Facts(("demo",))))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guard)) as client:
            ai = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client, max_retries=0)
            made = await work(ai)
        pool.close()
        return made

    return asyncio.run(run())


def test_openai_s_client_calls_a_custom_tool_in_chats() -> None:
    engine = FakeEngine(written("generic", "apply_patch", PATCHES[0]))

    async def work(ai: Any) -> None:
        asked: dict[str, Any] = {"model": "demo", "tools": [CHAT_PATCH, SHELL]}
        choice = {"type": "custom", "custom": {"name": "apply_patch"}}
        answer = await ai.chat.completions.create(messages=ASK, tool_choice=choice, **asked)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "apply_patch", PATCHES[0])
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        after = [*ASK, answer.choices[0].message.model_dump(exclude_none=True), result]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [choice]}}
        stream = await ai.chat.completions.create(messages=after, tool_choice=allowed, stream=True, **asked)
        deltas = [one async for chunk in stream if chunk.choices for one in chunk.choices[0].delta.tool_calls or ()]
        assert (deltas[0].type, deltas[0].custom["name"]) == ("custom", "apply_patch") and len(deltas) > 9
        assert "".join(one.custom["input"] for one in deltas) == PATCHES[0]

    with_openai(engine, work)
    first, second = (engine.tokenizer.decode(one.tokens) for one in engine.asked)
    assert '"input"' in first and "which must match this lark grammar" in first
    assert json.dumps({"name": "apply_patch", "arguments": {"input": PATCHES[0]}}, ensure_ascii=False) in second
    assert "shell" not in second and "done" in second
    assert all(one.grammar is not None for one in engine.asked)


def test_openai_s_client_calls_a_custom_tool_in_responses() -> None:
    engine = FakeEngine(written("generic", "apply_patch", PATCHES[0]))

    async def work(ai: Any) -> None:
        asked = {"model": "demo", "tools": [FLAT_PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}
        answer = await ai.responses.create(input=ASK, **asked)
        (item,) = answer.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", PATCHES[0])
        result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
        stream = await ai.responses.create(input=[result], previous_response_id=answer.id, stream=True, **asked)
        events = [one async for one in stream]
        deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
        (done,) = (one for one in events if one.type == "response.custom_tool_call_input.done")
        (added,) = (one for one in events if one.type == "response.output_item.added")
        assert "".join(deltas) == done.input == PATCHES[0] and len(deltas) > 9 and added.item.input == ""
        assert events[-1].response.output[0].input == PATCHES[0] and done.item_id == added.item.id

    with_openai(engine, work)
    second = engine.tokenizer.decode(engine.asked[1].tokens)
    assert json.dumps(PATCHES[0], ensure_ascii=False) in second and "done" in second


def custom(**form: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "t", "format": form}}


def lark(definition: Any, syntax: str = "lark") -> dict[str, Any]:
    return custom(type="grammar", grammar={"syntax": syntax, "definition": definition})


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"tools": [lark("start: 'a'")]}, "the grammar of the tool t"),
        (CHAT, {"tools": [lark("start: missing")]}, "the grammar of the tool t"),
        (CHAT, {"tools": [lark("(", "regex")]}, "the grammar of the tool t"),
        (CHAT, {"tools": [lark("start: /a*?/")]}, "the grammar of the tool t"),
        (CHAT, {"tools": [lark("a" * 70_000)]}, "format.definition"),
        (CHAT, {"tools": [lark(5)]}, "format.definition"),
        (CHAT, {"tools": [lark("a", "ebnf")]}, "format.syntax"),
        (CHAT, {"tools": [custom(type="json")]}, "the type text or grammar"),
        (CHAT, {"tools": [{"type": "custom", "name": "t"}]}, "custom.name"),
        (CHAT, {"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": "shell"}}}, "no custom tool"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "t", "format": {"type": "grammar"}}]}, "format.syntax"),
        (RESPONSES, {"tools": [FLAT_PATCH], "tool_choice": {"type": "function", "name": "apply_patch"}}, "no tool"),
        ("/api/chat", {"tools": [CHAT_PATCH]}, "tools: expected functions"),
    ],
)
def test_a_custom_tool_that_cannot_be_honoured_is_refused(path: str, body: dict[str, Any], words: str) -> None:
    asked = {"input": "a"} if path == RESPONSES else {"messages": ASK}
    (answer,) = answers(FakeEngine(), (path, {"model": "demo", **asked, **body}))
    assert answer.status_code == 400 and words in answer.text, answer.text
