"""The conversation on a terminal: questions and commands, answers as they stream, Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.chat.interrupt import Interrupts
from mlcpipe.cli.chat.markdown import Renderer
from mlcpipe.cli.chat.screen import Screen, no_echo
from mlcpipe.cli.chat.session import Answer, Session
from mlcpipe.cli.chat.slash_commands import Commands, ExitChat
from mlcpipe.cli.terminal import say, stdout_console
from mlcpipe.errors import MlcpipeError

if TYPE_CHECKING:
    from mlcpipe.cli.chat.prompt import Prompt
    from mlcpipe.runtime.sampling_params import Stats


class Repl:
    """Reads questions and commands until the user leaves; `describe` makes the line of statistics."""

    def __init__(
        self, session: Session, history_file: Path | None, describe: Callable[[Stats], str], *, show_stats: bool
    ) -> None:
        self._session = session
        self._describe = describe
        self._console = stdout_console()
        self._screen = Screen()
        self._commands = Commands(session, self._say, self._regenerate, show_stats)
        self._history_file = history_file
        self._interrupts = Interrupts()
        self._prompt: Prompt | None = None

    def run(self, banner: str) -> None:
        """Talk until /exit, Ctrl-D or Ctrl-C twice."""
        from mlcpipe.cli.chat.prompt import Prompt

        with self._interrupts.noted():
            self._prompt = Prompt(self._history_file)
            self._say(banner)
            self._talk(self._prompt)

    def _talk(self, prompt: Prompt) -> None:
        interrupts = 0
        while True:
            try:
                self._interrupts.forget()
                text = prompt.ask(">>> ").strip()
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 2:
                    return
                self._say("Ctrl-C again, Ctrl-D or /exit leaves; /help shows the commands")
                continue
            except EOFError:
                return
            interrupts = 0
            if text and not self._turn(text):
                return

    def _turn(self, text: str) -> bool:
        """One question or command; False if the user wants to leave."""
        try:
            if not self._commands.run(text):
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

    def _answer(self, produce: Callable[[Renderer], Answer]) -> None:
        """Show an answer as it streams."""
        with no_echo(), self._interrupts.raised():
            if self._prompt is not None and self._prompt.interrupted():
                raise KeyboardInterrupt
            self._screen.wait()
            answer = produce(self._screen.renderer())
        self._show(answer)

    def _show(self, answer: Answer) -> None:
        """The lines after an answer: an unusual end, and the statistics."""
        self._screen.fresh_line()
        if answer.context_full:
            self._say("the context is full: /reset starts over")
        elif answer.finish_reason == "length":
            self._say("ended at max_tokens: /set max_tokens=none lifts the limit")
        elif answer.finish_reason == "interrupted":
            self._say("stopped")
        if self._commands.show_stats and answer.stats is not None:
            self._say(self._describe(answer.stats))
        self._say("")

    def _say(self, text: str) -> None:
        say(self._console, text, style="dim")
