"""Writes docs/cli.md from the command line's own help: `python docs/cli.py`. A test compares the two."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from mlcpipe.cli import app
from mlcpipe.support.env import VARIABLES

PAGE = Path(__file__).with_name("cli.md")


def page() -> str:
    """The page as Markdown: a section for each verb, with its help and a table of its options."""
    group: Any = typer.main.get_command(app)
    callbacks = {command.name: command.callback for command in app.registered_commands}
    parts = ["# Command line", "This page is generated from `--help` by `python docs/cli.py`."]
    for name, command in group.commands.items():
        types = {key: _kind(hint) for key, hint in get_type_hints(callbacks[name]).items()}
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        usage = " ".join([f"mlcpipe {name}", *(_argument(a) for a in arguments), "[options]"])
        parts += [f"## mlcpipe {name}", f"    {usage}", _text(command.help)]
        parts += [_table("argument", [(f"`{a.metavar or a.name}`", a) for a in arguments], types)]
        parts += [_table("option", [(_names(o), o) for o in options], types)]
    parts += ["## Environment variables", "A misspelt one is named on stderr.", _variables()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _variables() -> str:
    return "\n".join(["| variable | meaning |", "|---|---|", *(f"| `{n}` | {text} |" for n, text in VARIABLES.items())])


def _text(text: str) -> str:
    """Paragraphs of a command's help; those that are commands alone become one block of code."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    lines = [f"    {part[1:-1]}" if part[0] == part[-1] == "`" else part for part in paragraphs]
    return "\n\n".join(lines).replace("\n\n    ", "\n    ").replace(":\n    ", ":\n\n    ")


def _argument(argument: Any) -> str:
    name = argument.metavar or argument.name
    return name if argument.required else f"[{name}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts])


def _table(title: str, rows: list[tuple[str, Any]], types: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {title} | type | default | meaning |", "|---|---|---|---|"]
    for names, param in rows:
        value = getattr(param.default, "value", param.default)  # of an enum's member
        default = "required" if param.required else "" if value in (None, False, "", ()) else f"`{value}`"
        meaning = " ".join((getattr(param, "help", "") or "").split()).replace("|", "\\|")
        lines.append(f"| {names} | {types.get(param.name, '')} | {default} | {meaning} |")
    return "\n".join(lines)


def _kind(hint: Any) -> str:
    """What a value is: `int`, `path`; nothing for a flag."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType] or [bool]
    name = getattr(kinds[0], "__name__", str(kinds[0])).lower()
    return "" if name == "bool" else "text" if name == "str" else name


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
