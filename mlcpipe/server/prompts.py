"""From messages and tools to tokens: converts requests to the input of chat templates."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.pictures import completion, seen, with_rows
from mlcpipe.runtime.serving.grammar import Thinking
from mlcpipe.runtime.text.reasoning import BEGIN, END
from mlcpipe.runtime.text.thinking import thinking_switch, thoughts_after
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats import format_for
from mlcpipe.runtime.tool_formats.style import Messages, Tool, ToolFormat
from mlcpipe.runtime.tools import with_arguments, with_calls
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import value_in
from mlcpipe.server.message_content import content_of, listed, places_of, split_pictures, text_of
from mlcpipe.vision.processors.picture import Picture

# Claude Code's first line, which changes with every request and would defeat the prefix cache.
BILLING = "x-anthropic-billing-header:"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_KEPT = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_OURS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "allow_control_tokens"}
Ending = Literal["header", "nothing", "continued"]


@dataclass(frozen=True)
class Prompt:
    """tokens: the prompt; thinking: whether the answer begins, or may begin, with reasoning.

    Negative tokens stand for rows of `pictures`.
    """

    tokens: list[int]
    thinking: Thinking
    pictures: Sequence[Picture] = ()


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    style: ToolFormat,
    variables: Mapping[str, Any],
    ending: Ending = "header",
    vision: VisionInfo | None = None,
    room: int = 0,
) -> Prompt:
    """The prompt of a conversation: with the header of an answer, without it, or continuing the last message.

    Pictures are for the tower `vision` of a model that sees, and stand for at most `room` tokens.
    Raises UsageError, TemplateError or TokenizerError.
    """
    if ending == "continued" and style.channels:
        raise UsageError("continue_final_message", expected="a model whose answers have no channels")
    if ending == "continued":
        messages = [*messages[:-1], _begun(messages[-1])]
    given = plain_messages(messages)
    # Checked before parsing and rendering, which may take 100 times the memory.
    tokenizer.check_length(_chars([given, [[tool.description, tool.parameters] for tool in tools], variables]))
    plain, pictures = seen(given, vision, room)  # first: templates of texts fail where a model sees none
    prepared, extras = style.prepare([with_arguments({**message}, value_in) for message in plain], tools)
    clash = _OURS & set(variables)
    if clash:
        raise UsageError("chat_template_kwargs", expected="variables of the template", found=", ".join(sorted(clash)))
    ends = {"add_generation_prompt": ending == "header", "continue_final_message": ending == "continued"}
    name = tokenizer.template_name(extras.get("tools"))
    if "enable_thinking" in variables and (switch := thinking_switch(tokenizer.chat_template(name))):
        variables = {switch: variables["enable_thinking"], **variables}
    tokens = tokenizer.encode_chat(prepared, completed=completion(pictures, vision), **{**variables, **extras, **ends})
    if ending == "continued":
        content = prepared[-1]["content"]
        thinking: Thinking = "open" if content.rfind(BEGIN) > content.rfind(END) else "none"
    else:
        thinking = thoughts_after(tokenizer, tokenizer.chat_templates.get(name, ""), tokens)
    return Prompt(with_rows(tokens, pictures, tokenizer), thinking, pictures)


def _begun(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message that is continued: of its texts in parts no line break is a part, as for llama-server."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "".join(text_of([part], "continue_final_message") for part in content)}


def system_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The common beginning of prompts with this system message. Raises what `render` raises."""
    style = format_for(tokenizer.chat_templates)
    system = {"role": "system", "content": text}
    one, other = (
        render(tokenizer, [system, {"role": "user", "content": content}], (), style, {}).tokens for content in "aZ"
    )
    return [token for token, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Convert messages of the OpenAI API for templates.

    Content becomes text, or of a user a list of texts and pictures, `developer` becomes `system`, and leading system
    messages are joined. Pictures that tools return are those of the next message of the user, as templates write texts
    of tools alone. Raises ApiError for other content.
    """
    if not messages:
        raise ApiError(400, "messages: expected at least one", param="messages")
    out: Messages = []
    returned: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        where, place = places_of(message, index)
        role = message.get("role")
        if role not in _ROLES:
            raise ApiError(400, f"{where}.role: expected one of {', '.join(_ROLES)}", param=f"{where}.role")
        kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
        kept["role"] = {"developer": "system", "function": "tool"}.get(role, role)
        content = message.get("content")
        if kept["role"] == "tool":
            kept["content"], found = split_pictures(content, place)
            returned += found
        else:
            kept["content"] = (content_of if role == "user" else text_of)(content, place)
        if returned and role == "user":
            said = kept["content"]
            texts = [{"type": "text", "text": said}] if said else []
            kept["content"] = [*returned, *(texts if isinstance(said, str) else said)]
            returned = []
        elif returned and kept["role"] != "tool":
            out.append({"role": "user", "content": returned})
            returned = []
        if message.get("function_call") is not None and not kept.get("tool_calls"):  # before there were tools
            kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
        if kept.get("tool_calls"):
            listed(kept["tool_calls"], f"{where}.tool_calls")
            kept = with_calls(kept, where)
        if out and kept["role"] == out[-1]["role"] == "system" and len(out) == 1:
            out[0]["content"] = "\n\n".join(part for part in (out[0]["content"], kept["content"]) if part)
        else:
            out.append(kept)
    return [*out, {"role": "user", "content": returned}] if returned else out


def without_billing(texts: Sequence[str]) -> list[str]:
    """Parts of a system prompt, without the part that changes with every request."""
    return [text for text in texts if not text.startswith(BILLING)]


def _chars(value: Any) -> int:
    """Characters of all texts in plain JSON data."""
    chars, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            chars += len(part)
        elif isinstance(part, Mapping):
            left += part.keys()
            left += part.values()
        elif isinstance(part, (list, tuple)):
            left += part
    return chars
