"""Llama 3.1 to 3.3: an answer that is `{"name": …, "parameters": {…}}`, with or without `<|python_tag|>` before it.

Source: the chat template of meta-llama/Llama-3.2-1B-Instruct.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.tool_formats.json_call import JsonCallParser
from mlcpipe.runtime.tool_formats.style import (
    TEXT,
    Literal,
    Messages,
    Style,
    Tool,
    ToolParser,
    json_calls,
    to_template,
)

TAG = "<|python_tag|>"
_PLAIN = "PLAIN: /\\s*[^\\s{](.|\\n)*/ & ~/(.|\\n)*<\\|python_tag\\|>(.|\\n)*/\n"


class Llama3Json(Style):
    """Calls without marks around them."""

    name = "llama3_json"
    shown: Collection[str] = (TAG,)

    def detect(self, template: str) -> bool:
        """Whether the template asks for calls in this form."""
        return TAG in template or ('"parameters"' in template and "<|eot_id|>" in template)

    def prepare(self, messages: Messages, tools: Sequence[Tool]) -> tuple[Messages, dict[str, Any]]:
        """The template writes the tools."""
        return to_template(messages, tools)

    def grammar(self, tools: Sequence[Tool], literal: Literal, *, forced: bool, parallel: bool) -> GrammarSource | None:
        """One call, or several with semicolons; unless forced, with text around it.

        Text may begin with a brace, too: only calls after the tag are held to their schemas, or all calls if a tool is
        strict; then no text may begin so.
        """
        some, tag = json_calls(tools, "parameters"), literal(TAG)
        one = some.one
        calls = f'{one} ("; " {one})*' if parallel else one
        if forced:
            text = f"start: {calls}\n"
        elif any(tool.strict for tool in tools):
            text = f"start: {tag}? {calls} | (PLAIN ({tag} {calls})?)?\n{_PLAIN}"
        elif tag.startswith("<"):
            text = f"start: TEXT ({tag} {calls})?\n{TEXT}"
        else:
            return None
        return GrammarSource("lark", text + some.rules, some.parts, some.lark_parts)

    def parser(self, tools: Sequence[Tool]) -> ToolParser:
        """The parser of an answer that begins with a tool call, or has the tag."""
        return JsonCallParser([TAG], between=" \t\r\n;", bare={tool.name for tool in tools})


LLAMA3_JSON = Llama3Json()
