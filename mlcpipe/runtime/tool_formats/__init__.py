"""How models write tool calls: one file per format, found from the chat template."""

from __future__ import annotations

from collections.abc import Mapping

from mlcpipe.runtime.tool_formats.generic import GENERIC
from mlcpipe.runtime.tool_formats.harmony import HARMONY
from mlcpipe.runtime.tool_formats.hermes import HERMES
from mlcpipe.runtime.tool_formats.llama3_json import LLAMA3_JSON
from mlcpipe.runtime.tool_formats.mistral import MISTRAL
from mlcpipe.runtime.tool_formats.qwen3_xml import QWEN3_XML
from mlcpipe.runtime.tool_formats.style import ToolFormat

FORMATS: tuple[ToolFormat, ...] = (HARMONY, MISTRAL, QWEN3_XML, HERMES, LLAMA3_JSON, GENERIC)


def format_of(template: str | None) -> ToolFormat:
    """The style of a chat template: the first whose marks it contains, else the generic one."""
    return next(one for one in FORMATS if one.detect(template or ""))


def format_for(templates: Mapping[str, str]) -> ToolFormat:
    """The style of chat templates by name; `tool_use` writes tools itself, also with calls in an unknown style."""
    if "tool_use" not in templates:
        return format_of(templates.get("default"))
    found = format_of(templates["tool_use"])
    return HERMES if found is GENERIC else found
