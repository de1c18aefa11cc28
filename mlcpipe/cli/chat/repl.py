"""The conversation on a terminal: questions and commands, answers as they stream, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.chat.interrupt import Interrupts
from mlcpipe.cli.chat.renderer import Renderer
from mlcpipe.cli.chat.screen import Screen, no_echo
from mlcpipe.cli.chat.session import Answer, Session
from mlcpipe.cli.chat.slash_commands import Commands, ExitChat
from mlcpipe.cli.terminal import say, stdout_console
from mlcpipe.errors import MlcpipeError

if TYPE_CHECKING:
    from mlcpipe.cli.chat.prompt import Prompt
    from mlcpipe.runtime.sampling_params import Stats

PROMPT = ">>> "
_GOODBYES = ("bye", "exit", "quit")


class Repl:
    """Reads questions and commands until the user leaves; `describe` makes the line of statistics.

    `about` are rows for /show.
    """

    def __init__(
        self,
        session: Session,
        history_file: Path | None,
        describe: Callable[[Stats], str],
        *,
        show_stats: bool,
        hide_thinking: bool = False,
        about: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._session = session
        self._describe = describe
        self._console = stdout_console()
        self._screen = Screen(hide_thinking=hide_thinking)
        self._commands = Commands(
            session, self._say, self._regenerate, self._edit, self._screen.copy, about, show_stats
        )  # fmt: skip
        self._history_file = history_file
        self._interrupts = Interrupts()
        self._prompt: Prompt

    def run(self, banner: str) -> None:
        """Talk until /bye, Ctrl-D or Ctrl-C twice in an empty line."""
        from mlcpipe.cli.chat.prompt import Prompt

        with self._interrupts.noted():
            self._prompt = Prompt(self._history_file)
            self._say(banner)
            self._talk()

    def _talk(self) -> None:
        from mlcpipe.cli.chat.prompt import unquoted

        interrupted = False
        while True:
            try:
                self._interrupts.forget()
                text, quoted = unquoted(self._prompt.ask(PROMPT))
            except KeyboardInterrupt:
                if interrupted and not self._prompt.typed and self._may_leave():
                    return
                interrupted = True
                self._say("Ctrl-C again, Ctrl-D or /bye leaves; /help shows the commands")
                continue
            except EOFError:
                return
            interrupted = False
            if text and not self._turn(text, quoted):
                return

    def _may_leave(self) -> bool:
        """Whether the chat may be lost; Ctrl-D says so too."""
        if not self._session.unsaved:
            return True
        try:
            return self._prompt.confirm("Leave without saving this chat?")
        except KeyboardInterrupt:
            return False
        except EOFError:
            return True

    def _turn(self, text: str, quoted: bool) -> bool:
        """One question or command; False if the user wants to leave."""
        try:
            if not quoted and text.lower() in _GOODBYES:
                self._say(f'/bye or Ctrl-D leaves; """{text}""" says it to the model')
            elif quoted or not self._commands.run(text):
                self._answer(lambda renderer: self._session.ask(text, renderer))
        except ExitChat:
            return False
        except KeyboardInterrupt:
            self._screen.fresh_line()
            self._say("stopped\n")
        except MlcpipeError as error:
            self._screen.fresh_line()
            say(self._console, f"error: {error}\n", style="red")
        return True

    def _regenerate(self) -> None:
        self._answer(self._session.regenerate)

    def _edit(self) -> None:
        last = self._session.last_turn
        try:
            text = self._prompt.ask(PROMPT, edit=last[0]["content"] if last else "").strip()
        except EOFError:
            return
        self._interrupts.forget()  # one in the editor
        if text and last:
            self._answer(lambda renderer: self._session.regenerate(renderer, text))
        elif text:
            self._answer(lambda renderer: self._session.ask(text, renderer))

    def _answer(self, produce: Callable[[Renderer], Answer]) -> None:
        """Show an answer as it streams."""
        with no_echo(), self._interrupts.raised():
            if self._prompt.interrupted():
                raise KeyboardInterrupt
            self._screen.wait()
            answer = produce(self._screen.renderer())
        self._show(answer)

    def _show(self, answer: Answer) -> None:
        """The lines after an answer: an unusual end, and the statistics."""
        self._screen.fresh_line()
        if answer.context_full:
            self._say("the context is full: /clear starts over")
        elif answer.finish_reason == "length":
            self._say("ended at max_tokens: /set max_tokens none lifts the limit")
        elif answer.finish_reason == "interrupted":
            self._say("stopped")
        if self._commands.show_stats and answer.stats is not None:
            self._say(self._describe(answer.stats))
        self._say("")

    def _say(self, text: str) -> None:
        say(self._console, text, style="dim")
