"""Text of a bundle, a checkpoint or a path inside generated files of other languages.

Code only accepts plain words. Nothing is quoted there: any other text is refused, whatever it would mean. A shell's
words and TOML's strings hold any text.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import UsageError
from mlcpipe.support.json_files import shown

Value = str | Sequence[str] | Mapping[str, str]
"""A word, a list of words, or macros by name: their values are words, numbers or empty."""
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_PART = "[A-Za-z0-9_][A-Za-z0-9_.-]*"  # a number or a triple, too


@dataclass(frozen=True)
class _Language:
    """`word` is a pattern; `item` of a list and `macro` are formats, with `between` two of them."""

    word: str = f"{_PART}(/{_PART})*"
    item: str = "{}"
    between: str = ", "
    macro: str = "{}={}"


_C = _Language(word=_NAME, macro="#define {} {}", between="\n")
_CMAKE = _Language(macro="[[{}={}]]", between=" ")
_LANGUAGES = {
    **dict.fromkeys((".c", ".cc", ".h", ".mm"), _C),
    **dict.fromkeys((".in", ".txt"), _CMAKE),
    **dict.fromkeys((".kt", ".kts", ".swift"), _Language(item='"{}"')),
    **dict.fromkeys((".S", ".md"), _Language()),
}


def word(text: str, suffix: str) -> str:
    """`text`, if a file with this suffix may hold it in any place. Raises UsageError for any other."""
    return _matching(text, _LANGUAGES[suffix].word, suffix)


def filled(template: str, values: Mapping[str, Value], suffix: str) -> str:
    """The text of a file with this suffix, with `values[NAME]` for @NAME@. Raises UsageError as `word`."""
    return re.sub("@([A-Z]+)@", lambda place: _written(values[place[1]], suffix), template)


def write_templates(source: Path, folder: Path, values: Mapping[str, Value], pattern: str = "*") -> None:
    """Copy the files of `source` whose names match to the same places of `folder`, each `filled`."""
    for path in source.rglob(pattern):
        if path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(filled(path.read_text(encoding="utf-8"), values, path.suffix), encoding="utf-8")


def shell_word(text: object) -> str:
    """Any text, such as a path, as a word of a command that a user may paste into this system's shell."""
    return subprocess.list2cmdline([str(text)]) if os.name == "nt" else shlex.quote(str(text))


def toml_value(value: str | int | float) -> str:
    """A number or any text as TOML writes it: as JSON, without surrogates, and DEL is escaped too.

    Raises UsageError for half a surrogate pair, as of a path that is not UTF-8.
    """
    written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if re.search("[\ud800-\udfff]", written):
        raise UsageError("this text cannot stand in a file *.toml", expected="Unicode", found=shown(value))
    return written


def _matching(text: str, pattern: str, suffix: str) -> str:
    if not re.fullmatch(pattern, text):
        expected = "a word of ASCII letters, digits and _"
        raise UsageError(f"this text cannot stand in a file *{suffix}", expected=expected, found=shown(text))
    return text


def _written(value: Value, suffix: str) -> str:
    language = _LANGUAGES[suffix]
    if isinstance(value, str):
        return word(value, suffix)
    if isinstance(value, Mapping):
        macros = {
            _matching(name, _NAME, suffix): _matching(text, f"({_PART})?", suffix) for name, text in value.items()
        }
        quoted = {name: text if text.isdigit() or not text else f'"{text}"' for name, text in macros.items()}
        return language.between.join(language.macro.format(*macro).rstrip() for macro in quoted.items())
    return language.between.join(language.item.format(word(text, suffix)) for text in value)
