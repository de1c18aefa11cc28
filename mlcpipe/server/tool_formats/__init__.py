"""How models write calls of tools: one file a style, found from the chat template."""

from __future__ import annotations

from mlcpipe.server.tool_formats.generic import GENERIC
from mlcpipe.server.tool_formats.harmony import HARMONY
from mlcpipe.server.tool_formats.hermes import HERMES
from mlcpipe.server.tool_formats.llama3_json import LLAMA3_JSON
from mlcpipe.server.tool_formats.mistral import MISTRAL
from mlcpipe.server.tool_formats.qwen3_xml import QWEN3_XML
from mlcpipe.server.tool_formats.style import ToolFormat

FORMATS: tuple[ToolFormat, ...] = (HARMONY, MISTRAL, QWEN3_XML, HERMES, LLAMA3_JSON, GENERIC)


def format_of(template: str | None) -> ToolFormat:
    """The style of a chat template: the first that finds its marks there, else the generic one."""
    return next(one for one in FORMATS if one.detect(template or ""))
