"""From messages and tools to tokens: converts requests to the input of chat templates."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlcpipe.bundle.manifest import VisionInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.pictures import marked, read_pictures, with_rows
from mlcpipe.runtime.serving.grammar import Thinking
from mlcpipe.runtime.text.reasoning import BEGIN, END
from mlcpipe.runtime.text.thinking import thinking_switch, thoughts_after
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_formats import format_for
from mlcpipe.runtime.tool_formats.style import Messages, Tool, ToolFormat
from mlcpipe.runtime.tools import with_arguments, with_calls
from mlcpipe.server.bodies import MAX_ITEMS
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import value_in
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
    plain, sources = marked(plain_messages(messages))
    # Checked before parsing and rendering, which may take 100 times the memory.
    tokenizer.check_length(_chars([plain, [[tool.description, tool.parameters] for tool in tools], variables]))
    prepared, extras = style.prepare([with_arguments({**message}, value_in) for message in plain], tools)
    clash = _OURS & set(variables)
    if clash:
        raise UsageError("chat_template_kwargs", expected="variables of the template", found=", ".join(sorted(clash)))
    ends = {"add_generation_prompt": ending == "header", "continue_final_message": ending == "continued"}
    name = tokenizer.template_name(extras.get("tools"))
    if "enable_thinking" in variables and (switch := thinking_switch(tokenizer.chat_template(name))):
        variables = {switch: variables["enable_thinking"], **variables}
    tokens = tokenizer.encode_chat(prepared, **{**variables, **extras, **ends})
    pictures = read_pictures(sources, vision, room)
    if ending == "continued":
        content = prepared[-1]["content"]
        thinking: Thinking = "open" if content.rfind(BEGIN) > content.rfind(END) else "none"
    else:
        thinking = thoughts_after(tokenizer, tokenizer.chat_templates.get(name, ""), tokens)
    return Prompt(with_rows(tokens, pictures, tokenizer), thinking, pictures)


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
    messages are joined. Raises ApiError for other content.
    """
    if not messages:
        raise ApiError(400, "messages: expected at least one", param="messages")
    out: Messages = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise ApiError(400, f"{where}.role: expected one of {', '.join(_ROLES)}", param=f"{where}.role")
        kept = {key: message[key] for key in _KEPT if message.get(key) is not None}
        kept["role"] = {"developer": "system", "function": "tool"}.get(role, role)
        kept["content"] = (content_of if role == "user" else text_of)(message.get("content"), f"{where}.content")
        if message.get("function_call") is not None and not kept.get("tool_calls"):  # before there were tools
            kept["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
        if kept.get("tool_calls"):
            listed(kept["tool_calls"], f"{where}.tool_calls")
            kept = with_calls(kept, where)
        if out and kept["role"] == out[-1]["role"] == "system" and len(out) == 1:
            out[0]["content"] = "\n\n".join(part for part in (out[0]["content"], kept["content"]) if part)
        else:
            out.append(kept)
    return out


def content_of(content: Any, where: str) -> str | list[dict[str, Any]]:
    """As `text_of`; with pictures among its parts a list of parts for `mlcpipe.runtime.pictures`. Raises ApiError."""
    if not isinstance(content, list) or not any(_is_picture(part) for part in content):
        return text_of(content, where)
    return [
        {"type": "image", "image": _data(part["image_url"], f"{where}[{at}].image_url")}
        if _is_picture(part)
        else {"type": "text", "text": text_of([part], f"{where}[{at}]")}
        for at, part in enumerate(listed(content, where))
    ]


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message has a picture among its parts."""
    contents = [message.get("content") for message in messages]
    return any(_is_picture(part) for content in contents if isinstance(content, list) for part in content)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image_url" and "image_url" in part


def _data(image: Any, where: str) -> bytes:
    """The bytes of a data: URL, which may be in an object with `detail`. Raises ApiError for others."""
    fields = image if isinstance(image, Mapping) else {"url": image}
    url, detail = fields.get("url"), fields.get("detail")
    if detail not in (None, "auto", "high"):
        raise ApiError(400, f"{where}.detail: expected auto or high: pictures have one resolution", param=where)
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        shown = repr(url)[:60]
        raise ApiError(
            400,
            f"{where}: expected data:image/…;base64,…, found {shown}; pictures elsewhere are not fetched",
            param=where,
        )
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise ApiError(400, f"{where}: expected base64", param=where) from None


def text_of(content: Any, where: str) -> str:
    """Text, or the texts of a list of parts. Raises ApiError for pictures, sound and files."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in listed(content, where):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            shown = kind if isinstance(kind, str) else type(part).__name__
            raise ApiError(400, f"{where}: expected text, found {shown[:40]!r}; send text only", param=where)
        texts.append(text)
    return "\n".join(texts)


def without_billing(texts: Sequence[str]) -> list[str]:
    """Parts of a system prompt, without the part that changes with every request."""
    return [text for text in texts if not text.startswith(BILLING)]


def listed(value: Any, where: str) -> Sequence[Any]:
    """`value`, checked to be a list of at most `MAX_ITEMS`. Raises ApiError."""
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ApiError(400, f"{where}: expected a list of at most {MAX_ITEMS}", param=where)
    return value


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
