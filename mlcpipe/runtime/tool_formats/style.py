"""The interface of tool call styles, and parts that several styles share."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlcpipe.runtime.response_format import ANY_OBJECT
from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.serving.lark_in_json import escaped

Messages = list[dict[str, Any]]
_ID_CHARS = string.ascii_letters + string.digits
ROOT = {"$id": "tool:/"}  # references like "#/$defs/A" begin here
TEXT = "TEXT: /(.|\\n)*/\n"
INPUT = "input"  # the only argument of a custom tool
# Rules in Lark of a text inside the arguments of a custom tool, with the white space that JSON has there.
AROUND_INPUT = (
    f'W: /(\\n[ ]{{0,16}}|[ ])?/\nINPUT_BEGIN: "{{" W "\\"{INPUT}\\"" W ":" W "\\""\nINPUT_END: "\\"" W "}}"\n'
)
_OPENS = {"additionalProperties", "patternProperties", "anyOf", "oneOf", "allOf", "$ref"}  # may allow more values


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema.

    custom  whether it is one of OpenAI's custom tools, whose argument is a text
    lark    a grammar of that text, "" for none
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}}, hash=False)
    strict: bool = False
    custom: bool = False
    lark: str = ""

    def described(self) -> dict[str, Any]:
        """In the form of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Thought:
    """A part of the reasoning."""

    text: str


Piece = str | CallPiece | Thought


class ToolParser(Protocol):
    """Takes an answer's streaming text, returns text, calls and thoughts; `inside` while in thoughts."""

    @property
    def inside(self) -> bool: ...

    def push(self, text: str) -> list[Piece]:
        """The decided parts."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, at the end."""
        ...


class ToolFormat(Protocol):
    """A style."""

    name: str
    shown: Collection[str]  # control tokens that the parser needs to see in the text
    channels: bool  # whether the parser reads every answer, to separate thoughts from text

    def detect(self, template: str) -> bool:
        """Whether a chat template has this style."""
        ...

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """Messages and variables for the chat template."""
        ...

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """The grammar of an answer; None if unforced calls cannot be told from text."""
        ...

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """A parser for one answer."""
        ...

    def before_answer(self, literal: Literal) -> str:
        """Rules in Lark for the text before the answer, the first one named `before`; "" for nothing."""
        ...


class Style:
    """Shared by styles without channels."""

    channels = False

    def before_answer(self, literal: Literal) -> str:
        """Nothing."""
        return ""


Literal = Callable[[str], str]
"""A marker as a Lark grammar writes it: text, or a control token by its id."""


def to_template(messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
    """For templates that write tools themselves."""
    return messages, {"tools": [tool.described() for tool in tools]} if tools else {}


def arguments_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments: an object, empty if the tool has no parameters."""
    given = tool.parameters or ANY_OBJECT
    none = given.get("properties") == {} and not _OPENS & {*given}
    return {**ROOT, **given, "type": "object", **({"additionalProperties": False} if none else {})}


def call_schemas(tools: Sequence[Tool], arguments: str = "arguments") -> tuple[tuple[str, str], ...]:
    """For each tool the schema of `{"name": …, "arguments": …}`, as parts of a grammar named tool_0, tool_1 …"""
    return tuple(
        (
            f"tool_{index}",
            json.dumps(
                {
                    "type": "object",
                    "properties": {"name": {"const": tool.name}, arguments: arguments_schema(tool)},
                    "required": ["name", arguments],
                    "additionalProperties": False,
                }
            ),
        )
        for index, tool in enumerate(tools)
    )


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON in a Lark grammar: `one` of them, the rules that it names, and the parts that those name."""

    one: str
    rules: str
    parts: tuple[tuple[str, str], ...]
    lark_parts: tuple[tuple[str, str], ...] = ()


def json_calls(tools: Sequence[Tool], arguments: str = "arguments") -> JsonCalls:
    """Calls `{"name": …, "arguments": …}` of these tools.

    Beside a text that a Lark grammar describes, all names are in the grammar around it: llguidance does not choose
    among parts that begin alike. Raises UsageError for a grammar that cannot be inside JSON.
    """
    if not any(tool.lark for tool in tools):
        one = "(" + " | ".join(f"@tool_{index}" for index in range(len(tools))) + ")"
        return JsonCalls(one, "", call_schemas(tools, arguments))
    begin, comma = '"{" W "\\"name\\"" W ":" W', f'W "," W {quoted(quoted(arguments))} W ":" W'
    lines = [f"CALL_{index}: {begin} {quoted(quoted(tool.name))} {comma}" for index, tool in enumerate(tools)]
    one = " | ".join(f"CALL_{index} {in_json(tool, index)} CALL_END" for index, tool in enumerate(tools))
    rules = "\n".join([*lines, 'CALL_END: W "}"', AROUND_INPUT])
    return JsonCalls(f"({one})", rules, argument_parts(tools), input_parts(tools))


def in_json(tool: Tool, index: int) -> str:
    """The arguments of a tool in Lark, which names the part tool_0, tool_1 …"""
    return f"INPUT_BEGIN @tool_{index} INPUT_END" if tool.lark else f"@tool_{index}"


def argument_parts(tools: Sequence[Tool]) -> tuple[tuple[str, str], ...]:
    """The schemas of arguments that are not a text with a Lark grammar."""
    numbered = enumerate(tools)
    return tuple((f"tool_{index}", json.dumps(arguments_schema(tool))) for index, tool in numbered if not tool.lark)


def input_parts(tools: Sequence[Tool]) -> tuple[tuple[str, str], ...]:
    """The Lark grammars of texts inside JSON. Raises UsageError."""
    return tuple((f"tool_{index}", escaped(tool.lark)) for index, tool in enumerate(tools) if tool.lark)


def in_tags(begin: str, rest: str, *, forced: bool, parallel: bool) -> str:
    """Rules in Lark of calls that are `begin`, a marker, and `rest`; unless forced, with any text around them."""
    more = "*" if parallel else "?"
    if forced:
        repeated = '("\\n"? call)*' if parallel else ""
        return f"start: call {repeated}\ncall: {begin} {rest}\n"
    if begin.startswith("<"):  # a control token is no text, so it ends the text before it
        return f"start: (TEXT {begin} {rest}){more} TEXT\n{TEXT}"
    return f"start: (head {rest}){more} tail\nhead[lazy]: TEXT {begin}\ntail: TEXT\n{TEXT}"


def quoted(text: str) -> str:
    """A text as a Lark literal."""
    return json.dumps(text, ensure_ascii=False)


def call_id(length: int = 24, prefix: str = "call_") -> str:
    """A new id of a call."""
    return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(length))
