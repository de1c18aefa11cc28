"""Chat commands: lines that begin with "/"."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.cli.chat.screen import terminal_columns
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import KNOBS, shown
from mlcpipe.errors import UsageError
from mlcpipe.support.closest import closest


@dataclass(frozen=True)
class Command:
    """One command: its argument ("" for none), what it does, and other names, for /help and completion."""

    argument: str
    help: str
    aliases: tuple[str, ...] = ()


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "show this list", ("/?",)),
    "/clear": Command("", "start over; the system message and the settings stay", ("/reset",)),
    "/undo": Command("", "forget the last question and its answer"),
    "/edit": Command("", "change the last question in $VISUAL or $EDITOR and ask again"),
    "/regen": Command("", "answer the last question again (a fixed seed moves by one)"),
    "/copy": Command("", "copy the last answer to the terminal's clipboard"),
    "/image": Command("FILE", "show a picture with the next question, if the model sees"),
    "/video": Command("FILE", "show a video with the next question, if the model sees them"),
    "/system": Command("[TEXT]", 'set the system message; "" removes it, alone shows it'),
    "/set": Command("[key value …]", "change how answers are made; alone shows the settings"),
    "/show": Command("", "show the model, the device, the context and the settings"),
    "/stats": Command("", "show or hide the line with speeds after each answer"),
    "/save": Command("FILE", "write the chat with its keys and values; to FILE.json its messages alone"),
    "/load": Command("FILE", "continue a saved chat with its settings"),
    "/bye": Command("", "leave (also Ctrl-D)", ("/exit", "/quit")),
}

KEYS = (
    ("Enter", "send"),
    ("Alt-Enter or \\ Enter", "new line"),
    ('"""', 'begin several lines; """ ends them'),
    ("Up, Down", "earlier questions"),
    ("Tab", "complete a command"),
    ("Ctrl-C", "stop the answer, or clear the line; twice in an empty one: leave"),
)

_NAMES = {one: name for name, command in COMMANDS.items() for one in (name, *command.aliases)}
_COMMAND = re.compile(r"/(?:[a-z]*|\?)(?=\s|$)")
_LEAST_COLUMNS = 24  # of the right column


class ExitChat(Exception):
    """The user wants to leave."""


@dataclass
class Commands:
    """Carries out commands on a session; texts for the user go to `say`.

    regenerate, edit  answer the last question again, as it is or changed
    copy              to the clipboard
    about             rows of /show that do not change
    """

    session: Session
    say: Callable[[str], None]
    regenerate: Callable[[], None]
    edit: Callable[[], None]
    copy: Callable[[str], None]
    about: Sequence[tuple[str, str]] = ()
    show_stats: bool = True

    def run(self, line: str) -> bool:
        """Carry out the command in `line`; False if it is not a command (a path such as /etc/hosts is a question).

        Raises ExitChat, and UsageError if the command is unknown or its argument is wrong.
        """
        match = _COMMAND.match(line)
        if match is None:
            return False
        typed, argument = match[0], line[match.end() :].strip()
        if typed not in _NAMES:
            raise UsageError(
                f"there is no command {typed}", expected=closest(typed, _NAMES), next_step="/help lists the commands"
            )
        name = _NAMES[typed]
        wanted = COMMANDS[name].argument
        if argument and not wanted:
            raise UsageError(f"{typed} takes no argument", found=repr(argument)[:60])
        if not argument and wanted and not wanted.startswith("["):
            raise UsageError(f"{typed} needs an argument", expected=f"{typed} {wanted}")
        getattr(self, f"_{name[1:]}")(argument)
        return True

    def _help(self, argument: str) -> None:
        self.say(columns([*command_rows(), ("", ""), *KEYS]))

    def _clear(self, argument: str) -> None:
        self.session.reset()
        self.say("The chat starts over.")

    def _undo(self, argument: str) -> None:
        question = self.session.undo()
        self.say(f"forgotten: {textwrap.shorten(question, 60, placeholder='…')}")

    def _edit(self, argument: str) -> None:
        self.edit()

    def _regen(self, argument: str) -> None:
        self.regenerate()

    def _copy(self, argument: str) -> None:
        text = self.session.answer_to_copy()
        self.copy(text)
        self.say(f"sent {len(text)} characters to the clipboard by OSC 52, if the terminal allows it")

    def _image(self, argument: str) -> None:
        path = _path(argument)
        self.session.show(path)
        self.say(f"shown with the next question: {path}")

    def _video(self, argument: str) -> None:
        path = _path(argument)
        self.session.show(path, "videos")
        self.say(f"shown with the next question: {path}")

    def _system(self, argument: str) -> None:
        if argument:
            self.session.system = "" if argument in ('""', "''") else argument
        self.say(f"system message: {self.session.system or 'none'}")

    def _set(self, argument: str) -> None:
        before = self.session.settings.values()
        self.session.change(self.session.settings.with_text(argument))
        rows = [(key, shown(value)) for key, value in self.session.settings.values().items()]
        if argument:
            changed = [f"{key} {value}" for key, value in rows if value != shown(before[key])]
            return self.say(", ".join(changed) or "nothing changed")
        width = max(len(value) for _, value in rows)
        self.say(columns([(f"{key:<18}  {value:>{width}}", KNOBS[key].help) for key, value in rows]))

    def _show(self, argument: str) -> None:
        used, most = self.session.context_tokens()
        count = len(self.session.messages)
        values = self.session.settings.values().items()
        self.say(columns([
            *self.about,
            ("context", f"{used} of {most} tokens"),
            ("messages", f"{count}{', not saved' if self.session.unsaved else ''}"),
            ("system", self.session.system or "none"),
            ("settings", ", ".join(f"{key} {shown(value)}" for key, value in values if value is not None)),
        ]))  # fmt: skip

    def _stats(self, argument: str) -> None:
        self.show_stats = not self.show_stats
        self.say(f"speeds after each answer: {'on' if self.show_stats else 'off'}")

    def _save(self, argument: str) -> None:
        path = _path(argument)
        count = self.session.save(path)
        self.say(f"saved {count} messages to {path}")

    def _load(self, argument: str) -> None:
        path = _path(argument)
        count = self.session.load(path)
        self.say(f"loaded {count} messages and the settings from {path}")

    def _bye(self, argument: str) -> None:
        raise ExitChat


def command_rows() -> list[tuple[str, str]]:
    """Each command with its argument and other names, and what it does."""
    return [
        (", ".join((f"{name} {command.argument}".strip(), *command.aliases)), command.help)
        for name, command in COMMANDS.items()
    ]


def columns(rows: Sequence[tuple[str, str]]) -> str:
    """Rows in two columns, the right one wrapped; below the left one in a narrow terminal."""
    most, left = terminal_columns() - 1, max(len(name) for name, _ in rows)
    indent = left + 4 if left + 4 + _LEAST_COLUMNS <= most else 6
    lines = []
    for name, text in rows:
        head = f"  {name}"
        wrapped = textwrap.wrap(text, max(most - indent, 1)) or [""]
        if len(head) + 2 > indent:
            lines.append(head)
        else:
            wrapped[0] = f"{head:<{indent}}{wrapped[0]}"
        lines += [f"{'' if line.startswith('  ') else ' ' * indent}{line}".rstrip() for line in wrapped]
    return "\n".join(lines)


def _path(argument: str) -> Path:
    """A file name read as in a shell: quotes and ~."""
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'"
    return Path(os.path.expanduser(argument[1:-1] if quoted else argument))
