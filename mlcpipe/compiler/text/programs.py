"""The tokenizer and template files of a bundle for the native runtime."""

from __future__ import annotations

from collections.abc import Callable

from mlcpipe.compiler.text.template_program import template_program
from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TemplateError, TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.progress import Progress

TOKENIZER_PROGRAM, TEMPLATE_PROGRAM = "tokenizer.bin", "template.bin"


def text_programs(tokenizer: Tokenizer, progress: Progress, *, required: bool) -> dict[str, bytes]:
    """Name -> content of the files; a base model has no template.

    A feature that the native runtime lacks raises TokenizerError or TemplateError if the files are `required`. Else the
    file is left out with a note: Python needs neither.
    """
    programs: dict[str, Callable[[], bytes]] = {TOKENIZER_PROGRAM: lambda: tokenizer_program(tokenizer)}
    source, tool_use = map(tokenizer.chat_templates.get, ("default", "tool_use"))
    if source is not None:
        control, special = tokenizer.literal.control.values(), tokenizer.special_tokens
        programs[TEMPLATE_PROGRAM] = lambda: template_program(
            source, tool_use=tool_use, control=control, special_tokens=special
        )
    made = {}
    for name, make in programs.items():
        try:
            made[name] = make()
        except (TokenizerError, TemplateError) as error:
            if required:
                raise
            progress.note(f"without {name}, which programs without Python need: {error}")
    return made
