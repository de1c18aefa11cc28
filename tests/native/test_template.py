"""A chat template renders in C++ what it renders in Python, and refuses what it refuses there."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.contents import ContentMarks
from tests.native.conftest import Build
from tests.native.templates import NOW, NativeTemplate, build
from tests.unit.text import chats
from tests.unit.text.test_contents import SURGERY, each

FOLDER = Path(__file__).parents[1] / "unit" / "text" / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
VARIABLES = {"functions": "[]", "datetime": "2026-03-01"}  # of firefunction
WORDS = (*chats.PARTS, "<|im_end|>", "<|im_start|>user", "é\u0301", "\u200b", "\x7f", "ΑΣ", "null", "{}")


def jsons(draw: random.Random, depth: int = 0) -> Any:
    """Data as in the arguments of a tool."""
    leaves = [None, True, False, 0, -7, 2.5, 1e-7, 1e20, "", "a b", "é🎉\n\"'<|im_end|>", 1 << 40]
    if depth > 2 or draw.random() < 0.5:
        return draw.choice(leaves)
    if draw.random() < 0.5:
        return [jsons(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {
        draw.choice(("á", "type", "b", "items", "<b>", "name")): jsons(draw, depth + 1)
        for _ in range(draw.randint(0, 3))
    }


def tool(draw: random.Random) -> dict[str, Any]:
    names = draw.sample(("á", "b", "c", "items"), draw.randint(0, 3))
    kinds = (
        {"type": "string", "enum": ["y", "n"]},
        {"type": "integer", "description": "x"},
        {"type": ["string", "null"]},
        {"type": "boolean", "default": False},
    )
    parameters: dict[str, Any] = {"type": "object", "properties": {name: dict(draw.choice(kinds)) for name in names}}
    if draw.random() < 0.7:
        parameters["required"] = names[:1]
    if draw.random() < 0.3:
        parameters["properties"]["list"] = {
            "type": "array",
            "items": {"type": "object", "properties": {"x": {"type": "number"}}},
        }
    function: dict[str, Any] = {
        "name": draw.choice(("add", "get_weather")),
        "description": draw.choice(("", "Sčítá <čísla>\nand more")),
        "parameters": parameters,
    }
    if draw.random() < 0.2:
        del function["description"]
    return {"type": "function", "function": function}


def conversations(seed: int, count: int) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Messages and variables: mostly in the order that templates expect, some in any."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices(WORDS, k=draw.choice((0, 1, 3, 8))))

    def content() -> Any:
        kind = draw.random()
        if kind < 0.85:
            return text()
        return None if kind < 0.9 else [{"type": "text", "text": text()} for _ in range(draw.randint(0, 2))]

    def message(role: str) -> dict[str, Any]:
        made: dict[str, Any] = {"role": role, "content": content()}
        if role == "assistant" and draw.random() < 0.3:
            made[draw.choice(("reasoning_content", "thinking", "reasoning"))] = text()
        if role == "assistant" and draw.random() < 0.3:
            arguments = draw.choice(({"á": 1, "b": [None, 2.5]}, {}, '{"á": 1}', {"x": jsons(draw)}))
            call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": arguments}}
            made["tool_calls"] = [call] * draw.choice((1, 1, 2))
        if role == "tool":
            made |= {"name": "add", "tool_call_id": "call12345"}
        return made

    for _ in range(count):
        roles = ["system"] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 3)):
            roles += ["user", *(["assistant", "tool"] if draw.random() < 0.3 else []), "assistant"]
        if draw.random() < 0.7:
            roles.pop()
        if draw.random() < 0.2:
            roles = draw.choices(("system", "user", "assistant", "tool", "developer", "strange"), k=draw.randint(1, 5))
        extras: dict[str, Any] = {"add_generation_prompt": draw.random() < 0.7}
        if draw.random() < 0.4:
            extras["tools"] = [tool(draw) for _ in range(draw.randint(0, 3))]
        if draw.random() < 0.2:
            extras["documents"] = [{"title": text(), "text": text(), "content": text()}]
        if draw.random() < 0.3:
            extras[draw.choice(("enable_thinking", "thinking", "custom_tools", "date_string", "reasoning_effort"))] = (
                draw.choice((True, False, "low"))
            )
        yield [message(role) for role in roles], extras


def outcome(template: ChatTemplate, messages: Any, extras: dict[str, Any]) -> tuple[str | None, str]:
    try:
        return None, template.render(messages, **extras)
    except MlcpipeError as error:
        return type(error).__name__, str(error)


def compare(native: NativeTemplate, template: ChatTemplate, seed: int, count: int) -> tuple[dict[str, int], list[str]]:
    """How many conversations were rendered, refused or failed, and where the two differ."""
    counts, wrong = {"rendered": 0, "refused": 0, "failed": 0}, []
    for messages, extras in conversations(seed, count):
        theirs, ours = outcome(template, messages, VARIABLES | extras), native.render(messages, **VARIABLES, **extras)
        refused = theirs[1].startswith("the chat template refuses")
        counts["rendered" if theirs[0] is None else "refused" if refused else "failed"] += 1
        if theirs[0] is None:
            same = ours == theirs
        elif refused:
            same = (ours[0], " ".join(ours[1].split())) == theirs
        elif "RecursionError" in theirs[1]:  # of a macro without end
            same = "nested" in ours[1]
        else:
            same = ours[0] == theirs[0] and ours[1].split(";")[0] == theirs[1].split(";")[0]
        if not same:
            wrong.append(f"{messages} {extras}\n  C++    {ours}\n  Python {theirs}")
    return counts, wrong


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return build(native_library)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_refusals_are_those_of_python(library: ctypes.CDLL, name: str) -> None:
    native = NativeTemplate(library, TEMPLATES[name], **TOKENS)
    counts, wrong = compare(native, ChatTemplate(TEMPLATES[name], **TOKENS, now=lambda: NOW), 1, 60)
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"
    assert counts["rendered"] > 10


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "x",
        [1],
        [{}],
        [{"role": 1}],
        [{"role": ""}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [1]}],
    ]
    + [[{"role": "user", "content": [{"type": "image"}]}], [{"role": "user", "content": [{"type": "text"}]}]],
)
def test_messages_of_another_form_are_refused(library: ctypes.CDLL, messages: Any) -> None:
    kind, line = NativeTemplate(library, "{{ messages }}").render(messages)
    assert (kind, line.split(";")[0]) == (
        "UsageError",
        outcome(ChatTemplate("{{ messages }}"), messages, {})[1].split(";")[0],
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"[",
            b"[1,]",
            b'{"a" 1}',
            b"{a:1}",
            b"[01]",
            b"[1.]",
            b"[1e]",
            b"[+1]",
            b"[NaN]",
            b"[Infinity]",
            b"tru",
            b"[1] 2",
        ),
        *(
            b'["\xff"]',
            b'["\xed\xa0\x80"]',
            b'["\xc0\x80"]',
            b'["\\ud800"]',
            b'["\\udc00\\ud800"]',
            b'["\\x"]',
            b'["\\u12"]',
            b'["a\nb"]',
            b'["a',
        ),
        *(
            b"[" * 200 + b"]" * 200,
            b"[" * 1_000_000,
            b"[99999999999999999999]",
            b'{"a":1}}',
            b"\xef\xbb\xbf[]",
            b"[1 2]",
            b"['a']",
        ),
    ],
    ids=lambda text: text[:20].decode(errors="replace"),
)
def test_bad_json_is_refused(library: ctypes.CDLL, text: bytes) -> None:
    native = NativeTemplate(library, "{{ x }}")
    good = b'[{"role": "user", "content": "x"}]'
    for messages, extras in ((text, b"{}"), (good, b'{"x": ' + text + b"}")):
        kind, line = native.render_json(messages, extras)
        assert kind == "UsageError" and line.startswith("JSON that cannot be read"), line


def test_json_is_read_as_python_reads_it(library: ctypes.CDLL) -> None:
    text = r'{"x": [1, -0, 1.0, -0.0, 1e3, 1E-7, 1e400, "\u00e9\ud83c\udf89\n\/\"", true, null, {"b": 1, "a": 2, "b": 3}, [], {}]}'
    kind, line = NativeTemplate(library, "{{ x }}{{ x | tojson }}").render_json(b'[{"role": "u"}]', text.encode())
    x = "[1, 0, 1.0, -0.0, 1000.0, 1e-07, inf, 'é🎉\\n/\"', True, None, {'b': 3, 'a': 2}, [], {}]"
    assert (kind, line) == (
        None,
        x + r'[1, 0, 1.0, -0.0, 1000.0, 1e-07, Infinity, "é🎉\n/\"", true, null, {"b": 3, "a": 2}, [], {}]',
    )


def parts(marked: str, stand_ins: dict[int, str]) -> str:
    """As the test library writes parts: runs of a message's characters between \\x01 and \\x02."""
    made = "".join(f"\x01{stand_ins[ord(char)]}\x02" if ord(char) in stand_ins else char for char in marked)
    return made.replace("\x02\x01", "")


@pytest.mark.parametrize("case", SURGERY)
def test_contents_are_marked_as_in_python(library: ctypes.CDLL, case: str) -> None:
    body, content = SURGERY[case]
    compare_marked(library, each(body), [([{"role": "user", "content": content}], {})])


@pytest.mark.parametrize("name", TEMPLATES)
def test_contents_of_conversations_are_marked_as_in_python(library: ctypes.CDLL, name: str) -> None:
    compare_marked(library, TEMPLATES[name], conversations(2, 30))


def compare_marked(library: ctypes.CDLL, source: str, given: Any) -> None:
    control = [*chats.control_tokens(source), " <b>", "end", "</tool_call>"]
    native, template = (
        NativeTemplate(library, source, control=control, **TOKENS),
        ChatTemplate(source, **TOKENS, now=lambda: NOW),
    )
    marks, compared = ContentMarks(control), 0
    for messages, extras in given:
        try:
            marked, stand_ins = template.render_marked(messages, marks, **VARIABLES, **extras)
        except MlcpipeError:
            continue
        assert native.render(messages, marked=True, **VARIABLES, **extras) == (None, parts(marked, stand_ins))
        compared += 1
    assert compared


def test_messages_with_all_stand_ins_are_refused(library: ctypes.CDLL) -> None:
    native = NativeTemplate(library, "{{ messages }}", control=["<x>"])
    signs = "".join(map(chr, range(0x1D800, 0x1DA00)))
    kind, line = native.render([{"role": "user", "content": signs}], marked=True)
    assert kind == "UsageError" and line.startswith("the messages have too many kinds of signs")
    assert native.render([{"role": "user", "content": signs[2:] + "<x>"}], marked=True)[0] is None
