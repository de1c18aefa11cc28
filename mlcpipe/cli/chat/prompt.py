"""The line editor of the chat: history, several lines, completion of commands, Ctrl-C."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.application.current import get_app_session
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, completion_is_selected, has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import create_confirm_session

from mlcpipe.cli.chat.settings import KNOBS
from mlcpipe.cli.chat.slash_commands import COMMANDS
from mlcpipe.support.private import private_folder

# As in Ollama, also after /system: three quotes begin a block, three at the end of a line end it.
_BLOCK = re.compile(r'\s*(?P<command>/system\s+)?"""(?P<text>.*?)(?P<end>"""\s*)?', re.DOTALL)


class CommandCompleter(Completer):
    """Completes commands, the keys of /set, and the files of /save and /load, but no questions."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the text before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, argument = text.partition(" ")
        if not space:
            for command, info in COMMANDS.items():
                for one in (command, *info.aliases):
                    if one.startswith(name):
                        text = f"{one} " if info.argument else one
                        yield Completion(text, -len(name), display=one, display_meta=info.help)
        elif name == "/set":
            word = argument.rpartition(" ")[2]
            for key, knob in KNOBS.items():
                if key.startswith(word):
                    yield Completion(f"{key}=", -len(word), display=key, display_meta=knob.help)
        elif name in ("/save", "/load", "/image", "/video"):
            yield from self._paths.get_completions(Document(argument.lstrip()), complete_event)


class ChatHistory(FileHistory):
    """Questions of earlier chats; a failed write does not end the chat."""

    def store_string(self, string: str) -> None:
        """Append to the file."""
        with contextlib.suppress(OSError):
            super().store_string(string)


class Prompt:
    """The prompt: Enter sends, Alt-Enter, a backslash at the end or an open block starts a new line.

    `typed` tells whether the text changed since the last `ask`.
    """

    def __init__(self, history_file: Path | None) -> None:
        output = get_app_session().output
        if isinstance(output, Vt100_Output):
            # It would ask the terminal for the cursor's position, with Ctrl-C as a key while it waits for the answer.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            history=_history(history_file),
            completer=CommandCompleter(),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation="... ",
            key_bindings=_bindings(),
            enable_history_search=True,
            output=output,
            tempfile_suffix=".md",
        )
        self._session.default_buffer.on_text_changed += self._on_text_changed
        self.typed = False

    def ask(self, message: str, *, edit: str | None = None) -> str:
        """The user's input, or `edit` after changes in the user's editor, or in the line if that fails.

        Raises KeyboardInterrupt for Ctrl-C in an empty line, where it is a key, and EOFError for Ctrl-D.
        """
        self.typed = False
        if edit is None:
            return self._session.prompt(message, handle_sigint=False)
        return self._session.prompt(message, default=edit, pre_run=_open_editor, handle_sigint=False)

    def confirm(self, question: str) -> bool:
        """The answer to a question, y or n; Enter is n. Raises KeyboardInterrupt and EOFError as `ask`."""
        return bool(create_confirm_session(question).prompt(handle_sigint=False))

    def interrupted(self) -> bool:
        """Whether Ctrl-C followed Enter while the terminal still made it a key. Later keys are kept."""
        source = self._session.input
        keys = [*get_typeahead(source), *(source.read_keys() if sys.platform != "win32" else ())]
        last = max((place for place, key in enumerate(keys) if key.key == Keys.ControlC), default=-1)
        store_typeahead(source, keys[last + 1 :])
        return last >= 0

    def _on_text_changed(self, buffer: Buffer) -> None:
        self.typed = True


def unquoted(text: str) -> tuple[str, bool]:
    """An input without the quotes of a block, and whether it is a question whatever it begins with."""
    block = _BLOCK.fullmatch(text)
    if block is None or not block["end"]:
        return text.strip(), False
    return (block["command"] or "") + block["text"].strip("\n"), not block["command"]


def _open_editor() -> None:
    get_app().current_buffer.open_in_editor(validate_and_handle=True)


def _history(path: Path | None) -> History:
    if path is None:
        return InMemoryHistory()
    try:
        private_folder(path.parent)
        path.touch(mode=0o600)  # questions are private
        path.read_bytes()
    except OSError:
        return InMemoryHistory()
    return ChatHistory(str(path))


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter", filter=~completion_is_selected)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        block = _BLOCK.fullmatch(buffer.text)
        if block is not None and not block["end"]:
            buffer.insert_text("\n")
        elif buffer.document.text_before_cursor.endswith("\\") and not buffer.document.text_after_cursor:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("enter", filter=completion_is_selected)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.complete_state = None  # accepts the completion; the next Enter sends

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c", filter=has_focus(DEFAULT_BUFFER) & Condition(lambda: bool(get_app().current_buffer.text)))
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return bindings
