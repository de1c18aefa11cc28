"""Chat commands: lines that begin with "/"."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import KNOBS
from mlcpipe.errors import UsageError


@dataclass(frozen=True)
class Command:
    """One command: its argument ("" for none) and what it does, for /help and completion."""

    argument: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "show this list"),
    "/reset": Command("", "start over; the system message and the settings stay"),
    "/system": Command("[TEXT]", 'set the system message; "" removes it, alone shows it'),
    "/regen": Command("", "answer the last question again (a fixed seed moves by one)"),
    "/set": Command("[key=value …]", "change how answers are made; alone shows the settings"),
    "/stats": Command("", "show or hide the line with speeds after each answer"),
    "/save": Command("FILE", "write the chat with its keys and values; to FILE.json its messages alone"),
    "/load": Command("FILE", "continue a saved chat with its settings"),
    "/exit": Command("", "leave (also Ctrl-D)"),
}

KEYS = (
    ("Enter", "send"),
    ("Alt-Enter or \\ Enter", "new line"),
    ("Up, Down", "earlier questions"),
    ("Tab", "complete a command"),
    ("Ctrl-C", "stop the answer; twice at the prompt: leave"),
)

_COMMAND = re.compile(r"/[a-z]*(?=\s|$)")


class ExitChat(Exception):
    """The user wants to leave."""


@dataclass
class Commands:
    """Carries out commands on a session; texts for the user go to `say`."""

    session: Session
    say: Callable[[str], None]
    regenerate: Callable[[], None]
    show_stats: bool = True

    def run(self, line: str) -> bool:
        """Carry out the command in `line`; False if it is not a command (a path such as /etc/hosts is a question).

        Raises ExitChat, and UsageError if the command is unknown or its argument is wrong.
        """
        match = _COMMAND.match(line)
        if match is None:
            return False
        name, argument = match[0], line[match.end() :].strip()
        actions: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/system": self._system,
            "/regen": self._regen,
            "/set": self._set,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/exit": self._exit,
        }
        if name not in actions:
            raise UsageError(f"there is no command {name}", next_step="/help lists the commands")
        wanted = COMMANDS[name].argument
        if argument and not wanted:
            raise UsageError(f"{name} takes no argument", found=repr(argument)[:60])
        if not argument and wanted and not wanted.startswith("["):
            raise UsageError(f"{name} needs an argument", expected=f"{name} {wanted}")
        actions[name](argument)
        return True

    def _help(self, argument: str) -> None:
        rows = [(f"{name} {command.argument}".strip(), command.help) for name, command in COMMANDS.items()]
        rows += [("", ""), *KEYS]
        width = max(len(left) for left, _ in rows)
        self.say("\n".join(f"  {left:<{width}}  {right}".rstrip() for left, right in rows))

    def _reset(self, argument: str) -> None:
        self.session.reset()
        self.say("The chat starts over.")

    def _system(self, argument: str) -> None:
        if argument:
            self.session.system = "" if argument in ('""', "''") else argument
        self.say(f"system message: {self.session.system or 'none'}")

    def _regen(self, argument: str) -> None:
        self.regenerate()

    def _set(self, argument: str) -> None:
        settings = self.session.settings
        for assignment in re.sub(r"\s*=\s*", "=", argument).split():
            settings = settings.with_text(assignment)
        self.session.settings = settings
        rows = [(key, "none" if v is None else f"{v:g}" if isinstance(v, float) else str(v), KNOBS[key].help)
                for key, v in settings.values().items()]  # fmt: skip
        width = max(len(value) for _, value, _ in rows)
        self.say("\n".join(f"  {key:<18}  {value:>{width}}  {text}" for key, value, text in rows))

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

    def _exit(self, argument: str) -> None:
        raise ExitChat


def _path(argument: str) -> Path:
    """A file name read as in a shell: quotes and ~."""
    quoted = len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'"
    return Path(os.path.expanduser(argument[1:-1] if quoted else argument))
