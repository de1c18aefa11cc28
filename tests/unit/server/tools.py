"""What tests of styles share: tools, templates with tools, and what a parser reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from mlcpipe.runtime.text.harmony import MARKS
from mlcpipe.runtime.tool_formats import FORMATS
from mlcpipe.runtime.tool_formats.style import Thought, Tool, ToolParser
from tests.conftest import write_byte_tokenizer

BY_NAME = {one.name: one for one in FORMATS}
THINKS = "<|channel|>analysis<|message|>Rome, they say.<|end|>"  # harmony's
NEXT = "<|start|>assistant"
WEATHER = Tool(
    "weather",
    "Tells the weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Tool("clock")

# The parts of real templates that concern tools, shortened: what `detect` finds them by is whole.
HERMES = """{%- if tools %}<|im_start|>system
# Tools
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
For each function call, return a json object within <tool_call></tool_call> XML tags.<|im_end|>
{%- endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN3_XML = HERMES.replace('{"name": "{{ c.function.name }}"', "<function={{ c.function.name }}>")
LLAMA3 = """{%- if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}<|python_tag|>"""
MISTRAL = """{%- for m in messages %}[INST]{{ m.content }}[/INST]{%- if m.tool_calls %}[TOOL_CALLS] {{ m.tool_calls | tojson }}{% endif %}{% endfor %}"""
# Of the harmony format's structure: a header, a text and a mark for each message.
HARMONY = """{%- macro said(who, channel, text) %}<|start|>{{ who }}{% if channel %}<|channel|>{{ channel }}{% endif %}<|message|>{{ text }}<|end|>{% endmacro %}
{%- if tools %}{{- said('developer', none, tools | tojson) }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.thinking %}{% if m.content %}{{ raise_exception('thoughts and text beside a call') }}{% endif %}{{- said('assistant', 'analysis', m.thinking) }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last and not add_generation_prompt else '<|end|>') }}
{%- elif m.role == 'tool' %}{{- said('functions.' + messages[loop.index0 - 1].tool_calls[0].function.name + ' to=assistant', 'commentary', m.content) }}
{%- else %}{{- said(m.role, none, m.content) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
PLAIN = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def write_harmony_tokenizer(folder: Path) -> None:
    """One of bytes, with the marks of harmony and a template that writes them."""
    write_byte_tokenizer(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(list(MARKS))
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|return|>", "chat_template": HARMONY}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of a stream in these pieces."""
    return joined([*(one for piece in pieces for one in parser.push(piece)), *parser.finish()])


def joined(pieces: list[Any]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls that a parser gave in pieces."""
    text, calls = "", list[list[str]]()
    for found in pieces:
        if isinstance(found, Thought):
            continue
        if isinstance(found, str):
            text += found
        elif found.name is not None:
            assert (found.index, bool(found.id)) == (len(calls), True)
            calls.append([found.name, found.arguments])
        else:
            calls[found.index][1] += found.arguments
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


# The grammar of Codex's tool apply_patch, and patches of it.
PATCH_GRAMMAR = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
PATCHES = [
    '*** Begin Patch\n*** Update File: a "b"\\c.py\n@@ def f():\n-x = "1\\n"\t\n+y\n*** End of File\n*** End Patch',
    '*** Begin Patch\n*** Delete File: \\\n*** Add File: a\n+é\U0001f600 "q"\n+\n*** End Patch\n',
]
