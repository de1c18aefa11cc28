"""The chat's keys, without a terminal: what is typed, what the engine is asked, and how the chat ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlcpipe.cli.chat.prompt import Prompt
from mlcpipe.cli.chat.repl import Repl
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import Settings
from tests.unit.cli.fake_engine import FakeEngine

CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"
Chat = Callable[..., tuple[FakeEngine, list[str]]]


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Chat:
    """Runs a chat: each of `keys` is typed when the chat next asks for input, in the end Ctrl-D.

    Returns the engine and the keys that were left when the chat ended.
    """

    def run(*keys: str) -> tuple[FakeEngine, list[str]]:
        left, engine = [*keys, CTRL_D], FakeEngine(["one", "two", "three"])
        for name in ("ask", "confirm"):
            inner = getattr(Prompt, name)

            def typed(*args: object, inner: Callable[..., object] = inner, **options: object) -> object:
                pipe.send_text(left.pop(0))
                return inner(*args, **options)

            monkeypatch.setattr(Prompt, name, typed)
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            repl = Repl(Session(engine, Settings()), tmp_path / "history", str, show_stats=False)
            repl.run("")
        monkeypatch.undo()
        return engine, left

    return run


def questions(engine: FakeEngine) -> list[str]:
    """The last message of all that the engine was asked."""
    return [messages[-1]["content"] for messages, _, _ in engine.asked]


DRAFT = "\x1b[200~five\nlines\nof a\nlong\ndraft\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        ((CTRL_C, CTRL_C), [CTRL_D]),
        ((CTRL_C, DRAFT + CTRL_C + CTRL_C, CTRL_C), [CTRL_D]),  # the draft disarms: cleared, armed again, left
        ((DRAFT + CTRL_C + "Hi\r", CTRL_D), [CTRL_D]),  # the line alone is cleared
        ((CTRL_C, "Hi\r", CTRL_C, CTRL_D), [CTRL_D]),
        (("Hi\r", CTRL_C, CTRL_C, "n", CTRL_C, "y"), [CTRL_D]),  # the chat is not saved
        (("Hi\r", CTRL_C, CTRL_C, CTRL_C, CTRL_C, "\r", CTRL_C, CTRL_D), [CTRL_D]),
        (("Hi\r", "/undo\r", CTRL_C, CTRL_C), [CTRL_D]),  # nothing is lost
        (("Hi\r", "/bye\r"), [CTRL_D]),
        (("bye\r", "Exit\r", "quit\r"), []),
    ],
)
def test_leaving(chat: Chat, keys: tuple[str, ...], left: list[str]) -> None:
    engine, unused = chat(*keys)
    assert unused == left and questions(engine) == ["Hi"] * ("Hi\r" in "".join(keys))


def test_leaving_after_a_save(chat: Chat, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    assert chat("a\\\rb" + ALT_ENTER + "c\r", f"/save {path}\r", CTRL_C, CTRL_C)[1] == [CTRL_D]
    assert [one["content"] for one in json.loads(path.read_text(encoding="utf-8"))["messages"]] == ["a\nb\nc", "one"]
    history = tmp_path / "history"
    assert "+a\n+b\n+c" in history.read_text(encoding="utf-8") and history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        (('"""a\r\r b\r"""\r',), ["a\n\n b"]),
        (('"""/help"""\r',), ["/help"]),
        (('"""bye"""\r', "bye\r"), ["bye"]),
        (('"""never sent\r' + CTRL_C + "Hi\r",), ["Hi"]),
        (('say """x"""\r',), ['say """x"""']),
        (("/nonsense\r", "/?\r", "/set temperature 0\r", "/show\r"), []),
    ],
)
def test_questions_in_quotes(chat: Chat, keys: tuple[str, ...], asked: list[str]) -> None:
    assert questions(chat(*keys)[0]) == asked


def test_a_system_message_of_several_lines(chat: Chat) -> None:
    ((messages, _, _),) = chat('/system """a\rb"""\r', "Hi\r")[0].asked
    assert messages[0] == {"role": "system", "content": "a\nb"}


@pytest.mark.parametrize(
    ("editor", "typed", "asked"), [("printf 'x %s' \"$(cat $1)\" >$1", "", "x Hi"), ("false", "!\r", "Hi!")]
)
def test_edit(chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editor: str, typed: str, asked: str) -> None:
    """The answer is replaced; after an editor that fails, the line can be edited."""
    script = tmp_path / "editor"
    script.write_text(f"#!/bin/sh\n{editor}\n")
    script.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(script))
    engine, _ = chat("Hi\r", "/edit\r", typed, "And\r")
    assert questions(engine) == ["Hi", asked, "And"] and len(engine.asked[2][0]) == 3
