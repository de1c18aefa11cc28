"""Writes docs/cli.md from the command line's own help: `python docs/cli.py`. A test compares the two."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import typer

from mlcpipe.cli import app
from mlcpipe.cli.chat.slash_commands import KEYS, command_rows
from mlcpipe.support.env import VARIABLES

PAGE = Path(__file__).with_name("cli.md")


def page() -> str:
    """The page as Markdown: a section for each verb, with its help and a table of its options."""
    group: Any = typer.main.get_command(app)
    callbacks = {command.name: command.callback for command in app.registered_commands}
    parts = ["# Command line", "This page is generated from `--help` by `python docs/cli.py`."]
    parts.append(" ·\n".join(f"[{name}](#mlcpipe-{name})" for name in group.commands))
    shared = _shared(group.commands.values())
    for name, command in group.commands.items():
        types = {key: _kind(hint) for key, hint in get_type_hints(callbacks[name]).items()}
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
        usage = " ".join([f"mlcpipe {name}", *(_argument(a) for a in arguments), "[options]"])
        parts += [f"## mlcpipe {name}", f"    {usage}", _text(command.help)]
        parts += [_table("argument", [(f"`{a.metavar or a.name}`", a) for a in arguments], types)]
        parts += [_table("option", [(_names(o), o) for o in options], types, shared)]
        if name == "chat":
            lines = [f"| `{left}` | {right} |" for left, right in (*command_rows(), *KEYS)]
            parts += ["In the conversation:", "\n".join(["| command or key | meaning |", "|---|---|", *lines])]
    parts += ["## Options of several verbs", "| option | meaning |\n|---|---|"]
    parts[-1] += "".join(f"\n| `{name}` | {text} |" for text, name in shared.items())
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


def _shared(commands: Any) -> dict[str, str]:
    """Long texts that are the same at three verbs or more -> the option, to stand on the page once."""
    options = [p for command in commands for p in command.params if p.param_type_name == "option" and not p.hidden]
    counted = Counter(_meaning(option) for option in options)
    texts = sorted(text for text, count in counted.items() if count > 2 and len(text) > 120)
    return {text: next(o.opts[0] for o in options if _meaning(o) == text) for text in texts}


def _meaning(param: Any) -> str:
    return " ".join((getattr(param, "help", "") or "").split()).replace("|", "\\|")


def _table(title: str, rows: list[tuple[str, Any]], types: Mapping[str, str], shared: Mapping[str, str] = {}) -> str:
    if not rows:
        return ""
    lines = [f"| {title} | meaning |", "|---|---|"]
    for names, param in rows:
        value = getattr(param.default, "value", param.default)  # of an enum's member
        value = max(param.opts, key=len) if value is True else value
        kind = f" {types[param.name]}" if types.get(param.name) else ""
        default = "Required. " if param.required else "" if value in (None, False, "", ()) else f"Default `{value}`. "
        meaning = "[See below](#options-of-several-verbs)." if _meaning(param) in shared else _meaning(param)
        lines.append(f"| {names}{kind} | {default}{meaning} |")
    return "\n".join(lines)


def _kind(hint: Any) -> str:
    """What a value is: `int`, `path`; nothing for a flag."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType] or [bool]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return ", ".join(str(member.value) for member in kinds[0])
    name = getattr(kinds[0], "__name__", str(kinds[0])).lower()
    return "" if name == "bool" else "text" if name == "str" else name


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
