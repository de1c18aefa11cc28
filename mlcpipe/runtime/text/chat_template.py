"""Render the chat template of a checkpoint: messages in, the prompt's text out.

A chat template is code that came with a download. It renders in `template_sandbox`, whose docstring says which
attacks are stopped and how: any template ends within about two seconds of processor time, in bounded memory, with
a TemplateError of one line. The text equals that of transformers' `apply_chat_template(tokenize=False)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mlcpipe.errors import TemplateError, UsageError
from mlcpipe.runtime.text.contents import ContentMarks
from mlcpipe.runtime.text.template_sandbox import LimitError, Sandbox

MAX_SOURCE = 256 << 10  # characters; templates with tools and reasoning have about 3000
REFUSED = "the chat template refuses the messages"
_MAX_STRFTIME = 256  # characters of a date format
_HERE = "the message continues here "
_PROBE, _PART = "the text of a message", {"type": "text"}
_KINDS_OF_PARTS = re.compile(r"""['".]type\b""")
_REASONING = ("reasoning_content", "thinking", "reasoning")

# Everything that a template's code can raise. KeyboardInterrupt goes through.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


class _Refusal(jinja2.TemplateError):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here only its scope matters."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.With([], [], body, lineno=lineno)


_ROLES = ("system", "user", "assistant", "tool", "developer")


class ChatTemplate:
    """A compiled chat template; safe to share between threads.

    `special_tokens` are more variables for the template (`pad_token`, `unk_token`, …), `now` is the clock behind
    `strftime_now`. `source` is the template's text. Raises TemplateError for a template that does not compile.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                "the chat template is too long",
                expected=f"at most {MAX_SOURCE} characters",
                found=len(source),
            )
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        # A token that is not set must be undefined, as in transformers: None would be written as "None".
        self._tokens = {name: text for name, text in tokens.items() if text is not None}
        functions = {"raise_exception": _raise_exception, "strftime_now": _clock(now)}
        self.source = source
        self._compile(Sandbox(functions, [loopcontrols, _Generation]))
        if _KINDS_OF_PARTS.search(source) and not self._writes(_PROBE) and self._writes([_PART | {"text": _PROBE}]):
            self._compile(Sandbox(functions, [loopcontrols, _Generation], parts=True))

    def _compile(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        try:
            self._template = sandbox.from_string(self.source)
        except _FAILURES as error:
            raise _failure(error, "the chat template does not compile") from error

    def _writes(self, content: str | list[dict[str, str]]) -> bool:
        """Whether the prompt of one message has its text: some templates write nothing of one that is no list."""
        try:
            return _PROBE in self.render([{"role": "user", "content": content}])
        except TemplateError:
            return False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extras: Any,
    ) -> str:
        """The prompt for `messages`, each with a `role` and a `content`: text, None, or a list of text parts.

        `continue_final_message` ends it inside the last message, which has content, as transformers does.
        `extras` are variables of the template (`tools`, `documents`, `enable_thinking`, …), as plain JSON data.
        Raises UsageError for messages of another form, TemplateError where the template refuses them or fails.
        """
        given = self._given(messages, extras)
        return self._render(given, add_generation_prompt, {}, continue_final_message)

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        marks: ContentMarks,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extras: Any,
    ) -> tuple[str, dict[int, str]]:
        """As `render`, with stand-ins for characters of `messages` and `extras`, and what each stands for."""
        given, stand_ins = marks.mark(self._given(messages, extras), self._words)
        return self._render(given, add_generation_prompt, stand_ins, continue_final_message), stand_ins

    def syntax(self) -> nodes.Template:
        """The tree that the template is compiled from, with the sandbox's filters (`mlcpipe.…`) in between."""
        return self.sandbox.parse(self.source)

    def _given(self, messages: Sequence[Mapping[str, Any]], extras: Mapping[str, Any]) -> dict[str, Any]:
        check_messages(messages)
        return {
            **{name: _plain(value, name) for name, value in extras.items()},
            "messages": [_with_reasoning(_without_nothing(_plain(message, "messages"))) for message in messages],
        }

    def _render(
        self, given: Mapping[str, Any], add_generation_prompt: bool, stand_ins: Mapping[int, str], continues: bool
    ) -> str:
        variables = {"tools": None, "documents": None, **self._tokens, **given}
        variables["add_generation_prompt"] = add_generation_prompt
        said = ""
        if continues:
            *before, last = given["messages"]
            content, said = _unfinished(last.get("content"))
            variables["messages"] = [*before, {**last, "content": content}]
        try:
            text = self.sandbox.render(self._template, variables, stand_ins)
        except _FAILURES as error:
            raise _failure(error, "the chat template failed") from error
        return _up_to_here(text, said) if continues else text

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads from what it is given."""
        return frozenset(meta.find_undeclared_variables(self.syntax()))

    def words(self) -> set[str]:
        """The texts that the template calculates with, apart from what it only writes."""
        return self._words

    @cached_property
    def _words(self) -> set[str]:
        return self.sandbox.words(self.source)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises UsageError, which names the message, unless all have a role and a text content."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise UsageError("messages", expected="a list of objects", found=type(messages).__name__)
    if not messages:
        raise UsageError("messages", expected="at least one", found="none")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise UsageError(where, expected="an object with role and content", found=type(message).__name__)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise UsageError(f"{where}.role", expected="system, user, assistant or tool", found=repr(role))
        _check_content(message.get("content"), f"{where}.content")


def check_roles(messages: Sequence[Mapping[str, Any]], template: ChatTemplate) -> None:
    """Raises UsageError for a role that the chat template does not name, and for a message without content."""
    for index, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and role not in template.words():
            raise UsageError(f"messages[{index}].role", expected=", ".join(_ROLES), found=repr(role)[:60])
        if message.get("content") is None and not message.keys() - {"role", "name"}:
            raise UsageError(f"messages[{index}].content", expected="text", found="none")


def _check_content(content: object, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(where, expected="text, or a list of text parts", found=type(content).__name__)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if isinstance(part, Mapping) and part == {"type": "image"}:  # a picture, which the caller has
            continue
        if not isinstance(part, Mapping) or kind != "text" or not isinstance(part.get("text"), str):
            raise UsageError(
                f"{where}[{index}]",
                expected='{"type": "text", "text": …}',
                found=kind,
                next_step="send text only",
            )


def _plain(value: Any, name: str) -> Any:
    """A copy made of plain JSON types alone: the template must not meet an object with methods of its own."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part, name) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(part, name) for part in value]
    raise UsageError(name, expected="plain JSON data", found=type(value).__name__)


def _without_nothing(message: dict[str, Any]) -> dict[str, Any]:
    """Templates look whether a message has a key: as in transformers null is none, and no calls are none either."""
    return {key: value for key, value in message.items() if value is not None and (key, value) != ("tool_calls", [])}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read a message's reasoning under one of three names; as transformers, offer the two in use."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unfinished(content: str | list[dict[str, Any]] | None) -> tuple[str | list[dict[str, Any]], str]:
    """The content with `_HERE` after its text, or after that of its last part, and that text. Raises UsageError."""
    if not content and content != "":
        raise UsageError("continue_final_message", expected="a last message with content", found=repr(content))
    if isinstance(content, str):
        return content + _HERE, content
    *parts, end = content
    return [*parts, {**end, "text": end["text"] + _HERE}], end["text"]


def _up_to_here(text: str, content: str) -> str:
    """A prompt up to the end of its last message, of this content, which `_HERE` follows."""
    end = text.rfind(_HERE.strip())
    if end < 0 or content.strip() not in text:
        raise TemplateError(
            "the chat template does not write the end of the last message",
            next_step="leave out continue_final_message",
        )
    # Without its space, the template cuts spaces at the ends of messages: also those of the content.
    return text[:end] if text.startswith(_HERE, end) else text[:end].rstrip()


def _raise_exception(message: object = "") -> str:
    raise _Refusal(str(message))


def _clock(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if len(form) > _MAX_STRFTIME:
            raise LimitError(f"a date format over {_MAX_STRFTIME} characters")
        return now().strftime(form)

    return strftime_now


def _failure(error: Exception, what: str) -> TemplateError:
    found = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, _Refusal):
        return TemplateError(REFUSED, found=str(error)[:300], next_step="change the messages")
    if isinstance(error, LimitError):
        return TemplateError(
            "the chat template was stopped",
            expected="a template within the limits of chat templates",
            found=str(error)[:300],
            next_step="use the template of the original model, or `generate` to continue plain text",
        )
    line = getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateSyntaxError) else None
    return TemplateError(
        what,
        where=None if line is None else f"line {line}",
        found=found,
        next_step="check chat_template in the checkpoint, or use `generate` to continue plain text",
    )
