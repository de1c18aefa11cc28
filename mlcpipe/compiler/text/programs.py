"""The files of a bundle from which the native runtime reads and writes text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlcpipe.compiler.text.template_program import template_program
from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TemplateError, TokenizerError
from mlcpipe.progress import Progress
from mlcpipe.runtime.text.harmony import is_harmony
from mlcpipe.runtime.text.tokenizer import Tokenizer

TOKENIZER_PROGRAM, TEMPLATE_PROGRAM = "tokenizer.bin", "template.bin"


def text_programs(tokenizer: Tokenizer, progress: Progress, *, required: bool) -> dict[str, bytes]:
    """Name -> content of the files; of a base model there is no template.

    What the native runtime does not cover raises TokenizerError or TemplateError where it is `required`. Elsewhere the
    file is left out with a note: Python needs neither.
    """
    programs: dict[str, Callable[[], bytes]] = {TOKENIZER_PROGRAM: lambda: tokenizer_program(tokenizer)}
    source = tokenizer.chat_templates.get("default")
    if source is not None:
        control, special = tokenizer.apart.control.values(), tokenizer.special_tokens
        write = _harmony if is_harmony(source) else template_program
        programs[TEMPLATE_PROGRAM] = lambda: write(source, control=control, special_tokens=special)
    made = {}
    for name, make in programs.items():
        try:
            made[name] = make()
        except (TokenizerError, TemplateError) as error:
            if required:
                raise
            progress.note(f"without {name}, which programs without Python need: {error}")
    return made


def _harmony(source: str, **_: Any) -> bytes:
    raise TemplateError(
        "the native runtime does not read answers in the harmony format", expected="a chat template without channels",
        next_step="chat with `mlcpipe chat` or `mlcpipe serve`, which do",
    )  # fmt: skip
