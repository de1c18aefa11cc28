"""Thinking on and off by the variables that a chat template reads."""

from __future__ import annotations

from typing import Any

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.thinking import opens_thoughts, thinking_variables

QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
GRANITE = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% if thinking %}Think.{% endif %}"
GPT_OSS = "Reasoning: {{ reasoning_effort or 'medium' }}"
NONE = "{% for m in messages %}{{ m.thinking }}{% set thinking = 1 %}{{ thinking }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "thinking", "expected"),
    [
        (QWEN, None, {}),
        (NONE, None, {}),
        (QWEN, False, {"enable_thinking": False}),
        (QWEN, True, {"enable_thinking": True}),
        (GRANITE, True, {"thinking": True}),
        (GPT_OSS, True, {"reasoning_effort": "medium"}),
        (GPT_OSS, "high", {"reasoning_effort": "high"}),
        (QWEN + GPT_OSS, "low", {"reasoning_effort": "low", "enable_thinking": True}),
        (QWEN + GRANITE, False, {"enable_thinking": False}),
    ],
)
def test_variables(source: str, thinking: bool | str | None, expected: dict[str, Any]) -> None:
    assert thinking_variables(ChatTemplate(source), thinking) == expected


@pytest.mark.parametrize(
    ("source", "thinking", "words"),
    [
        (QWEN, "low", "thinking of this model; expected on or off; found low"),
        (GPT_OSS, False, "expected low, medium, high; found off"),
        (NONE, False, "cannot switch thinking; leave"),
        (NONE, "low", "cannot switch thinking; leave"),
        (GPT_OSS, "much", "expected on, off, low, medium, high; found 'much'"),
        (QWEN, 1, "found 1"),
    ],
)
def test_refusals(source: str, thinking: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        thinking_variables(ChatTemplate(source), thinking)


@pytest.mark.parametrize(
    ("source", "prompt", "opened"),
    [
        ("{# </think> #}", "user: a\n<think>\n", True),
        ("{# </think> #}", "<think></think>", False),
        ("", "<think>", False),
    ],
)
def test_prompts_that_open_thoughts(source: str, prompt: str, opened: bool) -> None:
    assert opens_thoughts(source, prompt) is opened
