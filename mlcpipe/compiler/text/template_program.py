"""Compiles a chat template to a program that `mlcpipe/native/runtime/text/template.h` renders.

jinja2 parses the template as the sandbox does, so that texts and refusals equal those of
`mlcpipe.runtime.text.chat_template`. Features that the native runtime lacks are refused here, by name.

Some values are only known when a template runs. There the native runtime stops, as at a limit of the sandbox, where it
would need an integer of more than 64 bits, a number spelled in other digits than ASCII, a complex number, `%c` or `%n`
in a format, a comparison of dict views, or a built-in function, a method or an unfinished loop written as text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from jinja2 import nodes as jinja
from numpy.typing import NDArray

from mlcpipe.compiler.text.tables import strings, tables
from mlcpipe.compiler.text.template_characters import character_tables
from mlcpipe.compiler.text.template_nodes import Writer
from mlcpipe.compiler.text.template_statements import Statements
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.contents import ContentMarks

KIND = b"mlc_chat"
VERSION = 1


def template_program(
    source: str,
    *,
    tool_use: str | None = None,
    control: Collection[str] = (),
    special_tokens: Mapping[str, str] | None = None,
) -> bytes:
    """The file of a template, for a tokenizer with such control tokens, and `bos_token` and so on by name.

    `tool_use` is the template for requests with tools. Raises TemplateError for a template that does not compile, or
    that uses a feature the native runtime lacks.
    """
    template = ChatTemplate(source)
    tree, own = template.syntax(), template.words()
    if tool_use is not None:
        other = ChatTemplate(tool_use)
        no_tools = jinja.Test(jinja.Name("tools", "load"), "none", [], [], None, None)
        tree = jinja.Template([jinja.If(no_tools, tree.body, [], other.syntax().body)], lineno=1)
        own = own | other.words()
    writer = Writer()
    statements = Statements(writer, template.sandbox)
    root, slots = statements.template(tree)
    marks = ContentMarks(control)
    letters = [(ord(letter), everywhere) for letter, everywhere in marks.letters()]
    controls = [writer.string(text) for text in marks.starts]
    words = [writer.string(word) for word in sorted(marks.own_words(own))] if control else []
    ranges, cases = character_tables(statements.expressions.names)
    mappings = [(kind, code, writer.string(text)) for kind, code, text in cases]
    special = [writer.string(text) for pair in (special_tokens or {}).items() for text in pair]
    nodes, operands = writer.arrays()
    sections: list[bytes | NDArray[Any]] = [nodes, operands, *strings(text.encode() for text in writer.strings)]
    for numbers in ([root, slots], ranges, mappings, letters, controls, words, special):
        sections.append(np.array(numbers, np.uint32))
    return tables(KIND, VERSION, sections)
