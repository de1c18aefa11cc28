"""Random conversations, and whether C++ renders them as Python does."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.contents import ContentMarks
from tests.native.templates import NOW, NativeTemplate
from tests.unit.text import chats

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


def parts(marked: str, stand_ins: dict[int, str]) -> str:
    """As the test library writes parts: runs of a message's characters between \\x01 and \\x02."""
    made = "".join(f"\x01{stand_ins[ord(char)]}\x02" if ord(char) in stand_ins else char for char in marked)
    return made.replace("\x02\x01", "")


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
