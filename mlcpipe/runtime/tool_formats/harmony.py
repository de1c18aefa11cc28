"""gpt-oss: messages on channels (`runtime/text/harmony.py`); a call is one `to=functions.NAME`, its text the arguments.

The chat template takes one call per message, followed by its result.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from mlcpipe.runtime.sampling_params import CallPiece
from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.text.harmony import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    MARKS,
    MESSAGE,
    START,
    HarmonyReader,
    Part,
    is_harmony,
)
from mlcpipe.runtime.tool_formats.style import (
    AROUND_INPUT,
    Literal,
    Messages,
    Piece,
    Style,
    Thought,
    Tool,
    ToolParser,
    argument_parts,
    call_id,
    in_json,
    input_parts,
    to_template,
)

_FUNCTIONS = "functions."
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class Harmony(Style):
    """Calls on the channel `commentary`."""

    name = "harmony"
    shown: Collection[str] = MARKS
    channels = True

    def detect(self, template: str) -> bool:
        """Whether the template writes channels."""
        return is_harmony(template)

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools; it requires one call per message, and thoughts or text beside a call."""
        return [_with_thoughts(message) for message in _in_turn(messages)], to_template(messages, tools)[1]

    def before_answer(self, literal: Literal) -> str:
        """Thoughts, and the header of `final`."""
        channel, message, constrain = literal(CHANNEL), literal(MESSAGE), literal(CONSTRAIN)
        until = f'{literal(END)} {literal(START)} "assistant"'
        # A control token is no text, so it ends the text before it.
        kind = "until" if until.startswith("<") else "until[lazy]"
        return (
            f'before: thought* {channel} "{FINAL}" (" "? {constrain} WORD)? {message}\n'
            f'thought: {channel} "{ANALYSIS}" {message} until\n'
            f"{kind}: TEXT {until}\nWORD: /[a-z]+/\nTEXT: /(.|\\n)*/\n"
        )

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """Messages, ending with a tool call or, unless forced, an answer."""
        channel, message = literal(CHANNEL), literal(MESSAGE)
        # Without a space or token before it, "json" would be part of the name.
        kind = f'(" "? {literal(CONSTRAIN)} "json" | " json" | " ")? {message}'
        rules = [
            f"start: (thought | said)* ({'call' if forced else 'call | before TEXT'})",
            f'said: {channel} "{COMMENTARY}" {message} until',
            "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
        ]
        for index, tool in enumerate(tools):
            to = f" to={_FUNCTIONS}{tool.name}"
            header = f"{channel} {json.dumps(COMMENTARY + to)} | {json.dumps(to)} {channel} {json.dumps(COMMENTARY)}"
            rules.append(f"call_{index}: ({header}) {kind} {in_json(tool, index)}")
        around = AROUND_INPUT if any(tool.lark for tool in tools) else ""
        text = "\n".join(rules) + "\n" + around + self.before_answer(literal)
        return GrammarSource("lark", text, argument_parts(tools), input_parts(tools))

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """The parser of channels."""
        return _HarmonyParser(bool(tools))


class _HarmonyParser:
    def __init__(self, calls: bool) -> None:
        self._calls = calls  # whether there are tools: without them a call is text
        self._reader = HarmonyReader()
        self._count = 0
        self._kind = ""  # of the message: call, thought or text
        self._shown: set[str] = set()  # kinds that had text
        self._gap = ""  # before the text of a message that follows one of the same kind
        self._any_arguments = False

    @property
    def inside(self) -> bool:
        """Whether the current text is reasoning."""
        return self._reader.thinks

    def push(self, text: str) -> list[Piece]:
        return [piece for part in self._reader.push(text) for piece in self._pieces(part)]

    def finish(self) -> list[Piece]:
        return [piece for part in self._reader.finish() for piece in self._pieces(part)] + self._ended()

    def _pieces(self, part: Part) -> list[Piece]:
        if part.begins:
            return self._ended() + self._begun(part)
        if self._kind == "call":
            self._any_arguments = True
            return [CallPiece(self._count - 1, arguments=part.text)]
        text, self._gap = self._gap + part.text, ""
        self._shown.add(self._kind)
        return [Thought(text) if self._kind == "thought" else text]

    def _begun(self, part: Part) -> list[Piece]:
        name = part.recipient.removeprefix(_FUNCTIONS)
        if self._calls and name and name != part.recipient:
            self._kind, self._any_arguments = "call", False
            self._count += 1
            return [CallPiece(self._count - 1, call_id(), name)]
        self._kind = "thought" if part.channel == ANALYSIS else "text"
        self._gap = "\n\n" if self._kind in self._shown else ""
        return []

    def _ended(self) -> list[Piece]:
        """A call without arguments has none."""
        missing = self._kind == "call" and not self._any_arguments
        self._kind = ""
        return [CallPiece(self._count - 1, arguments="{}")] if missing else []


def _in_turn(messages: Messages) -> Messages:
    """Split a message with several calls into one per call, each followed by its result."""
    out: Messages = []
    moved: set[int] = set()
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            out += [] if index in moved else [message]
            continue
        for number, call in enumerate(calls):
            first = message if number == 0 else {"role": "assistant", "content": ""}
            out.append({**first, "tool_calls": [call]})
            for later in range(index + 1, len(messages)):
                if messages[later].get("tool_call_id") == call.get("id") and later not in moved:
                    moved.add(later)
                    out.append(messages[later])
                    break
    return out


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Beside a call, text becomes part of the thoughts, if any."""
    thoughts = next((message[name] for name in _THOUGHTS if message.get(name)), "")
    if not (message.get("tool_calls") and thoughts and message.get("content")):
        return message
    kept = {name: value for name, value in message.items() if name not in _THOUGHTS}
    return {**kept, "reasoning_content": f"{thoughts}\n\n{message['content']}", "content": ""}


HARMONY = Harmony()
