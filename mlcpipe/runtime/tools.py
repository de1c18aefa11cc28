"""The tools of a conversation in OpenAI's JSON: which the model may call, whether it must, and calls it has made."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlcpipe.errors import UsageError, last_line
from mlcpipe.runtime.custom_tools import arguments_of, parameters_of
from mlcpipe.runtime.tool_formats.style import Tool

ToolLike = Mapping[str, Any] | Callable[..., object]
MAX_TOOLS = 512
_NAME = re.compile(r"[^\s<>\"\\]{1,256}")  # valid in every style of calls
_CHOICES = "none, auto, required or a tool"
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s+(.+)$", re.MULTILINE)  # of a docstring


@dataclass(frozen=True)
class ToolChoice:
    """The callable tools, and whether one must be called."""

    tools: Sequence[Tool] = ()
    forced: bool = False
    parallel: bool = True


def tool_of(name: object, description: object, parameters: object, strict: object, where: str) -> Tool:
    """A checked tool. Raises UsageError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}.name", expected="up to 256 characters, no space or tags", found=repr(name)[:60])
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise UsageError(f"{where}.parameters", expected="a JSON schema", found=type(parameters).__name__)
    return Tool(name, description if isinstance(description, str) else "", parameters, strict is True)


def custom_of(given: Mapping[str, Any], where: str) -> Tool:
    """A checked custom tool of OpenAI's, from its name, description and format. Raises UsageError."""
    parameters, lark = parameters_of(given.get("format"), where)
    tool = tool_of(given.get("name"), given.get("description"), parameters, True, where)
    return replace(tool, custom=True, lark=lark)


def choice_of(tools: Sequence[ToolLike], choice: object, *, parallel: bool = True) -> ToolChoice:
    """The tools in OpenAI's JSON, or functions, of which `tool_choice` leaves some. Raises UsageError.

    `choice` is none, auto (or None), required, `{"type": "function", "function": {"name": …}}`, the same of a
    custom tool, or `allowed_tools`.
    """
    made = [_tool(given, f"tools[{index}]") for index, given in enumerate(tools)]
    if not isinstance(choice, Mapping):
        return choose(made, choice, parallel=parallel)
    if choice.get("type") == "allowed_tools":
        return choose_allowed(made, choice.get("allowed_tools"), parallel=parallel)
    return choose(made, choice, parallel=parallel)


def choose(tools: Sequence[Tool], choice: object, *, parallel: bool = True) -> ToolChoice:
    """The tools that a choice allows: "none", "auto", "required", or a named one as a mapping. Raises UsageError."""
    if len(tools) > MAX_TOOLS:
        raise UsageError("tools", expected=f"at most {MAX_TOOLS}", found=len(tools))
    if isinstance(choice, Mapping):
        name, custom = _named(choice)
        kept = [tool for tool in tools if (tool.name, tool.custom) == (name, custom)]
        if not kept:
            kind = "custom tool" if custom else "tool"
            raise UsageError("tool_choice", expected=_CHOICES, found=f"no {kind} is named {str(name)[:100]!r}")
        return ToolChoice(kept[:1], forced=True, parallel=False)
    if choice not in (None, "none", "auto", "required"):
        raise UsageError("tool_choice", expected=_CHOICES, found=repr(choice)[:100])
    if choice == "required" and not tools:
        raise UsageError("tool_choice", expected="tools, as one is required", found="none")
    return ToolChoice() if choice == "none" else ToolChoice(tools, choice == "required", parallel)


def choose_allowed(tools: Sequence[Tool], allowed: object, *, parallel: bool) -> ToolChoice:
    """The tools that OpenAI's choice `allowed_tools` allows. Raises UsageError."""
    named = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(allowed, Mapping) or not isinstance(named, list):
        raise UsageError("tool_choice", expected="allowed_tools with a mode and a list of tools")
    names = [_named(one) for one in named if isinstance(one, Mapping)]
    kept = [tool for tool in tools if (tool.name, tool.custom) in names]
    return choose(kept, str(allowed.get("mode", "auto")), parallel=parallel)


def _named(given: Mapping[str, Any]) -> tuple[object, bool]:
    """The name of a tool, and whether it is a custom one, in the form of chats or of responses."""
    custom = given.get("type") == "custom"
    named = given.get("custom" if custom else "function", given)
    return named.get("name") if isinstance(named, Mapping) else None, custom


def with_calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message with its calls, if any, in the form of chat templates. Raises UsageError for another form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, (list, type(None))):
        raise UsageError(f"{where}.tool_calls", expected="a list", found=type(calls).__name__)
    return {**message, "tool_calls": [_call(call, f"{where}.tool_calls") for call in calls]} if calls else {**message}


def with_arguments(message: dict[str, Any], loads: Callable[[str], object] = json.loads) -> dict[str, Any]:
    """The message of `with_calls`, with arguments that are the text of a JSON object as that object.

    Raises what `loads` raises, apart from ValueError.
    """
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function["arguments"], str):
            with suppress(ValueError, RecursionError):
                parsed = loads(function["arguments"])
                function["arguments"] = parsed if isinstance(parsed, dict) else function["arguments"]
    return message


def _call(call: object, where: str) -> dict[str, Any]:
    if isinstance(call, Mapping) and call.get("type") == "custom":
        custom = call.get("custom")
        given = custom if isinstance(custom, Mapping) else {}
        called = {"name": given.get("name"), "arguments": arguments_of(given.get("input"))}
        return _call({"id": call.get("id"), "function": called}, where)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(where, expected="calls of functions with a name", found=repr(call)[:60])
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments") or "{}"},
    }


def _tool(given: object, where: str) -> Tool:
    """A tool in OpenAI's JSON, or a function with type hints and a docstring."""
    if callable(given):
        return _of_function(given, where)
    if isinstance(given, Mapping) and given.get("type") == "custom":
        custom = given.get("custom")
        return custom_of(custom if isinstance(custom, Mapping) else {}, f"{where}.custom")
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or given.get("type", "function") != "function" or not isinstance(function, dict):
        raise UsageError(where, expected='{"type": "function", "function": {"name": …}}', found=repr(given)[:60])
    get = function.get
    return tool_of(get("name"), get("description"), get("parameters"), get("strict"), f"{where}.function")


def _of_function(function: Callable[..., object], where: str) -> Tool:
    """The schema of a function's arguments is pydantic's, with descriptions of the docstring's section `Args:`."""
    from pydantic import TypeAdapter

    typed: Any = function
    try:
        schema = TypeAdapter(typed).json_schema()
    except Exception as error:  # of a type without a schema, of a name that does not exist
        raise UsageError(
            where, expected="a function whose type hints have a JSON schema", found=last_line(error),
            next_step="give the tool as JSON",
        ) from None  # fmt: skip
    if schema.get("type") != "object":
        raise UsageError(where, expected="a function whose arguments have names", found=inspect.signature(function))
    description, _, arguments = (inspect.getdoc(function) or "").partition("Args:")
    for name, text in _ARGUMENT.findall(re.split(r"\n\S", arguments)[0]):
        if name in schema["properties"]:
            schema["properties"][name].setdefault("description", text)
    name = getattr(function, "__name__", None)
    return tool_of(name, description.partition("\n\n")[0].strip(), schema, False, where)
