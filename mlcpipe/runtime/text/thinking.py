"""Thinking on and off: by which variables a chat template switches it, and whether a prompt has opened the thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.reasoning import BEGIN, END
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.defaults import THINKING_EFFORTS

EFFORT = "reasoning_effort"  # gpt-oss
_LAST_TOKENS = 16  # of a prompt's end, to look for an opened `<think>`
_SWITCHES = ("enable_thinking", "thinking")  # Qwen3, SmolLM3, GLM; Granite, DeepSeek-V3.1


def thinking_variables(template: ChatTemplate, thinking: bool | str | None) -> dict[str, Any]:
    """The variables that switch a template's thinking on or off, or set its effort (`THINKING_EFFORTS`); none for None.

    If the template only takes an effort, on is "medium". Raises UsageError for what the template cannot do.
    """
    if thinking is None:
        return {}
    if not isinstance(thinking, bool) and thinking not in THINKING_EFFORTS:
        raise UsageError("thinking", expected=f"on, off, {', '.join(THINKING_EFFORTS)}", found=repr(thinking)[:60])
    switch, takes_effort = thinking_switch(template), EFFORT in template.variables
    if isinstance(thinking, bool) and switch is not None:
        return {switch: thinking}
    if takes_effort and thinking:
        return {EFFORT: "medium" if thinking is True else thinking} | ({} if switch is None else {switch: True})
    if switch is None and not takes_effort:
        raise UsageError("this model's chat template cannot switch thinking", next_step="leave the setting out")
    raise UsageError(
        "thinking of this model",
        expected=", ".join(THINKING_EFFORTS) if takes_effort else "on or off",
        found=thinking or "off",
    )


def thinking_switch(template: ChatTemplate) -> str | None:
    """The variable that switches a template's thinking on and off, if there is one."""
    return next((name for name in _SWITCHES if name in template.variables), None)


def thoughts_after(tokenizer: Tokenizer, source: str, tokens: Sequence[int]) -> Literal["none", "may", "open"]:
    """Whether an answer may begin with thoughts, or continues those that its prompt of the template `source` opens."""
    end = tokenizer.decode(tokens[-_LAST_TOKENS:], skip_special_tokens=False)
    return "open" if opens_thoughts(source, end) else "may" if END in source else "none"


def opens_thoughts(source: str, prompt: str) -> bool:
    """Whether the end of a prompt of the template `source` opens thoughts, which the answer continues."""
    return END in source and prompt.rstrip().endswith(BEGIN)
