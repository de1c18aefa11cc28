"""A chat template renders in C++ what it renders in Python, and refuses what it refuses there."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.compiler.text.template_program import template_program
from mlcpipe.runtime.text.chat_template import ChatTemplate
from tests.native.conversations import TOKENS, compare, compare_marked, conversations, outcome
from tests.native.cxx import Build
from tests.native.templates import NOW, NativeTemplate, build
from tests.unit.text import chats

FOLDER = Path(__file__).parents[1] / "unit" / "text" / "templates"
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}


@pytest.fixture(scope="module")
def library(native_library: Build) -> ctypes.CDLL:
    return build(native_library)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_and_refusals_are_those_of_python(library: ctypes.CDLL, name: str) -> None:
    native = NativeTemplate(library, TEMPLATES[name], **TOKENS)
    counts, wrong = compare(native, ChatTemplate(TEMPLATES[name], **TOKENS, now=lambda: NOW), 1, 60)
    assert not wrong, f"{len(wrong)}, the first: {wrong[0]}"
    assert counts["rendered"] > 10


@pytest.mark.parametrize("extras", [{}, {"tools": None}, {"tools": []}, {"tools": chats.TOOLS}])
def test_a_template_for_tools(library: ctypes.CDLL, extras: dict[str, Any]) -> None:
    sources = (
        "{% set a = 1 %}{% for m in messages %}D{{ m.content }}{{ a }}{% endfor %}{{ b is defined }}\n",
        "{% set b = 2 %}{% macro f(x) %}[{{ x }}{{ b }}]{% endmacro %}T{{ f(tools | tojson) }}{{ a is defined }}\n",
    )
    native = NativeTemplate(library, template_program(sources[0], tool_use=sources[1]))
    chosen, messages = ChatTemplate(sources[extras.get("tools") is not None]), [{"role": "user", "content": "<x>"}]
    assert native.render(messages, **extras) == (None, chosen.render(messages, **extras))


def test_a_template_that_knows_only_parts(library: ctypes.CDLL) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}]
    expected = ChatTemplate(chats.PARTS_ONLY).render(messages)
    assert NativeTemplate(library, chats.PARTS_ONLY).render(messages) == (None, expected)


@pytest.mark.parametrize("more", [{"tool_calls": None}, {"tool_calls": []}, {"tool_calls": [1], "name": None, "x": []}])
def test_keys_without_a_value(library: ctypes.CDLL, more: dict[str, Any]) -> None:
    source, messages = (
        "{% for m in messages %}{{ m.keys() | list }}{% endfor %}",
        [{"role": "user", "content": "", **more}],
    )
    assert NativeTemplate(library, source).render(messages) == (None, ChatTemplate(source).render(messages))


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
    + [[{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [{"type": "text"}]}]],
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


@pytest.mark.parametrize("case", chats.SURGERY)
def test_contents_are_marked_as_in_python(library: ctypes.CDLL, case: str) -> None:
    body, content = chats.SURGERY[case]
    compare_marked(library, chats.each(body), [([{"role": "user", "content": content}], {})])


@pytest.mark.parametrize("name", TEMPLATES)
def test_contents_of_conversations_are_marked_as_in_python(library: ctypes.CDLL, name: str) -> None:
    compare_marked(library, TEMPLATES[name], conversations(2, 30))


def test_messages_with_all_stand_ins_are_refused(library: ctypes.CDLL) -> None:
    native = NativeTemplate(library, "{{ messages }}", control=["<x>"])
    signs = "".join(map(chr, range(0x1D800, 0x1DA00)))
    kind, line = native.render([{"role": "user", "content": signs}], marked=True)
    assert kind == "UsageError" and line.startswith("the messages have too many kinds of signs")
    assert native.render([{"role": "user", "content": signs[2:] + "<x>"}], marked=True)[0] is None
