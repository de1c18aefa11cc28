from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from mlcpipe.errors import TemplateError, UsageError
from mlcpipe.runtime.text.chat_template import MAX_SOURCE, ChatTemplate
from tests.unit.text.chats import PARTS_ONLY

TEMPLATES = Path(__file__).parent / "templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TODAY = datetime(2026, 3, 1, 12, 30)

SYSTEM = {"role": "system", "content": " Be brief. "}
ASK = {"role": "user", "content": "Co je <b>15 & 3</b>? 🎉 'x' \"y\"\n"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDvě.  "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"á": 1, "b": [None, 2.5]}}}],
}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "x"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Sčítá <čísla>",
            "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "á": {"enum": ["x", "y"]}}},
        },
    }
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [ASK],
    "system": [SYSTEM, ASK],
    "turns": [SYSTEM, ASK, ANSWER, ASK, ANSWER, ASK],
    "answered": [ASK, ANSWER],
    "tool": [SYSTEM, ASK, CALL, RESULT, ANSWER, ASK],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "reasoning": [ASK, {**ANSWER, "content": "2", "reasoning_content": "why"}, ASK],
    "two-users": [ASK, ASK],
}


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> PreTrainedTokenizerFast:
    class Today(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return TODAY

    monkeypatch.setattr(chat_template_utils, "datetime", Today)
    library = LibraryTokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")


def ours(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: TODAY)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", NAMES)
def test_text_equals_transformers(name: str, chat: str, reference: PreTrainedTokenizerFast) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ours(source)
    compared = 0
    for tools in (None, TOOLS):
        for prompt in (True, False):
            for extras in ({}, {"enable_thinking": False, "tools_in_user_message": False}):
                arguments: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, **extras}
                try:
                    expected = reference.apply_chat_template(
                        CHATS[chat], chat_template=source, tokenize=False, **arguments
                    )
                except (jinja2.TemplateError, TypeError) as error:  # where transformers fails, so do we
                    with pytest.raises(TemplateError) as caught:
                        template.render(CHATS[chat], **arguments)
                    assert str(error)[:40] in str(caught.value)
                else:
                    assert template.render(CHATS[chat], **arguments) == expected
                    compared += 1
    refused_anyway = {("inst", "two-users"), ("turns", "two-users"), ("turns", "tool")}
    cannot_take_parts = {("header", "parts"), ("inst", "parts"), ("end", "parts")}
    assert compared or (name, chat) in refused_anyway | cannot_take_parts


@pytest.mark.parametrize(
    "content", ["The answer is", " a  ", "a\n\n", "", "<think>\nhm", "<think>hm</think>so </s> it"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_message_that_goes_on_equals_transformers(
    name: str, content: str, reference: PreTrainedTokenizerFast
) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    for chat in ([ASK], [SYSTEM, ASK, ANSWER, ASK]):
        messages = [*chat, {"role": "assistant", "content": content}]
        arguments: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        try:
            expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **arguments)
        except ValueError:
            with pytest.raises(TemplateError, match="does not write the end of the last message"):
                ours(source).render(messages, **arguments)
        else:
            assert ours(source).render(messages, **arguments) == expected


PARTED = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"


@pytest.mark.parametrize("texts", [["a"], ["a", " b "], ["a", ""], ["</s>", "x\n"]])
def test_the_last_part_goes_on_as_in_transformers(texts: list[str], reference: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "assistant", "content": [{"type": "text", "text": text} for text in texts]}]
    arguments: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference.apply_chat_template(messages, chat_template=PARTED, tokenize=False, **arguments)
    assert ours(PARTED).render(messages, **arguments) == expected


@pytest.mark.parametrize("content", [[], None])
def test_nothing_cannot_go_on(content: Any) -> None:
    with pytest.raises(UsageError, match="continue_final_message; expected a last message with content"):
        ours(PARTED).render([{"role": "assistant", "content": content}], continue_final_message=True)


def test_every_test_template_renders_something() -> None:
    assert NAMES == ["chatml", "end", "features", "header", "inst", "turns"]


def test_the_templates_own_refusal_is_passed_on() -> None:
    source = (TEMPLATES / "inst.jinja").read_text(encoding="utf-8")
    with pytest.raises(TemplateError, match="refuses the messages; found After the optional system message"):
        ours(source).render([ASK, ASK])


def test_tokens_that_are_not_set_are_undefined() -> None:
    assert ChatTemplate("[{{ bos_token }}{{ pad_token }}]").render([ASK]) == "[]"
    template = ChatTemplate("[{{ bos_token }}{{ pad_token }}]", bos_token="<s>", special_tokens={"pad_token": "<p>"})
    assert template.render([ASK]) == "[<s><p>]"


def test_a_template_can_be_rendered_in_many_threads_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    template = ours((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"))
    chats = [[{"role": "user", "content": f"number {index}"}] for index in range(200)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(template.render, chats))
    assert all(f"number {index}<|im_end|>" in text for index, text in enumerate(texts))


def test_long_chats_are_within_the_budget() -> None:
    template = ours((TEMPLATES / "chatml.jinja").read_text(encoding="utf-8"))
    chat = [{"role": ("user", "assistant")[index % 2], "content": f"{index} " * 200} for index in range(2001)]
    assert template.render(chat).count("<|im_start|>") == 2002
    assert len(template.render([{"role": "user", "content": "word " * 2_000_000}])) > 10_000_000


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ("hello", "a list of objects; found str"),
        ([], "at least one"),
        (["hello"], r"messages\[0\]; expected an object"),
        ([{"content": "x"}], r"messages\[0\].role; .* found None"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([ASK, {"role": "user", "content": 3}], r"messages\[1\].content; .* found int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\]; .* found image_url"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]; .* found str"),
        ([{"role": "user", "content": "x", "tool_calls": {object()}}], "plain JSON data; found set"),
    ],
)
def test_broken_messages_are_named(messages: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=shown):
        ChatTemplate("{{ messages[0].content }}").render(messages)


def test_extras_must_be_data() -> None:
    with pytest.raises(UsageError, match="tools; expected plain JSON data"):
        ChatTemplate("x").render([ASK], tools=[print])


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{% for x in y %}", "does not compile in line 1"),
        ("line\n{{ x | nofilter }}", "nofilter"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ missing() }}", "'missing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("x" * (MAX_SOURCE + 1), "too long"),
    ],
)
def test_wrong_templates_say_what_is_wrong(source: str, shown: str) -> None:
    with pytest.raises(TemplateError, match=shown) as caught:
        ChatTemplate(source).render([ASK])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["one", "turns", "parts"])
def test_a_template_that_knows_only_parts_writes_texts(name: str) -> None:
    """As SmolVLM's: of a text it would write nothing."""
    texts = [
        (m["role"], m["content"] if isinstance(m["content"], str) else "".join(part["text"] for part in m["content"]))
        for m in CHATS[name]
    ]
    assert ChatTemplate(PARTS_ONLY).render(CHATS[name]) == "".join(f"{role}: {text}|" for role, text in texts)
