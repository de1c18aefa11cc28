"""A chat's state through questions, second tries, Ctrl-C and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcpipe import Engine
from mlcpipe.cli.chat.renderer import PlainRenderer, WithoutThoughts
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.slash_commands import COMMANDS, Commands, ExitChat
from mlcpipe.errors import UsageError
from tests.unit.cli.fake_engine import FakeEngine


class Screen:
    """Collects what a chat shows."""

    def __init__(self) -> None:
        self.text = ""

    def renderer(self) -> PlainRenderer:
        return PlainRenderer(self.write)

    def write(self, text: str) -> None:
        self.text += text


def interrupt_at(chunk: int) -> Callable[[int], None]:
    """Ctrl-C just before a chunk."""

    def press(number: int) -> None:
        if number == chunk:
            os.kill(os.getpid(), signal.SIGINT)

    return press


def test_a_conversation() -> None:
    engine, screen = FakeEngine(["Hello!", "Fine."]), Screen()
    session = Session(engine, Settings().with_values({"max_tokens": 9}), system="Be brief.")
    assert session.ask("Hi", screen.renderer()).text == "Hello!"
    session.ask("How are you?", screen.renderer())
    assert screen.text == "Hello!Fine."
    messages, sampling, max_tokens = engine.asked[1]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert max_tokens == 9 and sampling.temperature == 0.7
    assert [m["content"] for m in session.messages] == ["Be brief.", "Hi", "Hello!", "How are you?", "Fine."]


def test_regenerate_replaces_the_answer_and_moves_the_seed() -> None:
    engine, screen = FakeEngine(["one", "two", "three"]), Screen()
    session = Session(engine, Settings().with_values({"seed": 10}))
    session.ask("Q", screen.renderer())
    session.regenerate(screen.renderer())
    session.regenerate(screen.renderer())
    assert [m["content"] for m in session.messages] == ["Q", "three"]
    assert [sampling.seed for _, sampling, _ in engine.asked] == [10, 11, 12]
    assert engine.asked[2][0] == [{"role": "user", "content": "Q"}]


def test_nothing_to_regenerate() -> None:
    with pytest.raises(UsageError):
        Session(FakeEngine([]), Settings()).regenerate(Screen().renderer())


def test_raw_sends_the_text_alone() -> None:
    engine = FakeEngine(["a", "b"])
    session = Session(engine, Settings(), raw=True)
    session.ask("Once upon", Screen().renderer())
    session.ask("There was", Screen().renderer())
    assert [asked[0] for asked in engine.asked] == ["Once upon", "There was"]


def test_ctrl_c_during_an_answer_keeps_what_was_said() -> None:
    engine, screen = FakeEngine(["abcdefghi"], before_chunk=interrupt_at(2)), Screen()
    session = Session(engine, Settings())
    before = signal.getsignal(signal.SIGINT)
    answer = session.ask("Q", screen.renderer())
    assert signal.getsignal(signal.SIGINT) is before
    assert answer.finish_reason == "interrupted" and answer.stats is None
    assert session.messages[-1]["content"] == screen.text == answer.text == "abcdefghi"
    assert engine.closed == 1


def test_ctrl_c_before_the_first_token_forgets_the_question() -> None:
    engine = FakeEngine(["abc", "def"], before_chunk=interrupt_at(0))
    session = Session(engine, Settings())
    with pytest.raises(KeyboardInterrupt):
        session.ask("Q", Screen().renderer())
    assert session.messages == [] and engine.closed == 1


def test_ctrl_c_in_a_second_try_keeps_the_first_answer() -> None:
    engine = FakeEngine(["first", "second"])
    session = Session(engine, Settings())
    session.ask("Q", Screen().renderer())
    engine.before_chunk = interrupt_at(0)
    with pytest.raises(KeyboardInterrupt):
        session.regenerate(Screen().renderer())
    assert [m["content"] for m in session.messages] == ["Q", "first"]


def test_an_error_leaves_the_chat_as_it_was() -> None:
    session = Session(FakeEngine(["ok"], context_length=10), Settings())
    session.ask("Q", Screen().renderer())
    before = session.messages
    with pytest.raises(UsageError):
        session.ask("x" * 11, Screen().renderer())
    assert session.messages == before


@pytest.mark.parametrize(("limit", "full"), [(None, True), (5, True), (4, False)])
def test_context_full_is_not_max_tokens(limit: int | None, full: bool) -> None:
    engine = FakeEngine(["abcdefghijkl"], finish_reason="length")  # 4 tokens
    session = Session(engine, Settings(max_tokens=limit))
    assert session.ask("Q", Screen().renderer()).context_full is full


def test_undecodable_arguments_reach_the_model_as_text() -> None:
    engine = FakeEngine(["a"])
    Session(engine, Settings(), system="s\udcff").ask("q\udce4", Screen().renderer())
    assert [m["content"] for m in engine.asked[0][0]] == ["s?", "q?"]


def commands(session: Session) -> tuple[Commands, list[str]]:
    said: list[str] = []
    again, edit = (lambda word=word: said.append(word) for word in ("again", "edit"))
    return Commands(session, said.append, again, edit, said.append, [("model", "a fake")]), said


def test_commands(tmp_path: Path) -> None:
    session = Session(FakeEngine(["a"]), Settings())
    run, said = commands(session)
    session.ask("Q", Screen().renderer())
    path = tmp_path / "my chat.json"
    for line in ("/system Be brief.", "/set temperature=0 top_k = 5", f"/save '{path}'", "/regen", "/stats", "/reset"):
        assert run.run(line)
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    assert session.settings.sampling.temperature == 0 and session.settings.sampling.top_k == 5
    assert "again" in said and not run.show_stats
    assert run.run('/system ""') and run.run("/set top_k=1") and session.messages == []
    assert run.run(f"/load {path}")
    assert [m["content"] for m in session.messages] == ["Be brief.", "Q", "a"]
    assert session.settings.sampling.top_k == 5
    with pytest.raises(ExitChat):
        run.run("/exit")


def test_saving_with_keys_and_values(demo: Engine, tmp_path: Path) -> None:
    """The next question computes what is new; a file that is not right changes nothing."""
    session = Session(demo, Settings().with_values({"temperature": 0, "max_tokens": 8, "seed": 3}), system="Be short.")
    run, said = commands(session)
    session.ask("What is a compiler?", Screen().renderer())
    before, path = session.messages, tmp_path / "my chat"
    assert run.run(f"/save '{path}'") and said[-1] == f"saved 3 messages to {path}"
    expected = session.ask("And a linker?", Screen().renderer())
    demo.reset()
    other = Session(demo, Settings())
    run, said = commands(other)
    assert run.run(f"/load {path}") and said[-1] == f"loaded 3 messages and the settings from {path}"
    assert other.messages == before and other.settings.sampling.seed == 3
    answer = other.ask("And a linker?", Screen().renderer())
    assert answer.text == expected.text and answer.stats.cached_tokens == expected.stats.cached_tokens > 20
    path.write_bytes(path.read_bytes()[:-1])
    demo.save(tmp_path / "without", chat={"title": "no messages"})
    for bad in (path, tmp_path / "without"):
        with pytest.raises(UsageError, match="saved chat"):
            other.load(bad)
    assert len(other.messages) == 5


def test_a_session_in_a_file(demo: Engine, tmp_path: Path) -> None:
    """Without a file it begins a new chat; options override the file."""
    path = tmp_path / "chat"
    session = Session(demo, Settings().with_values({"max_tokens": 4, "seed": 3}), system="Be short.")
    session.resume(path, {"max_tokens": 4}, "Be short.")
    session.ask("Hello", Screen().renderer())
    session.save(path)
    other = Session(demo, Settings())
    other.resume(path, {"max_tokens": 5}, "")
    assert other.messages == session.messages
    assert other.settings.max_tokens == 5 and other.settings.sampling.seed == 3
    other.resume(path, {}, "Be long.")
    assert other.messages[0] == {"role": "system", "content": "Be long."}
    with pytest.raises(UsageError, match="no folder for the chat"):
        other.resume(tmp_path / "no" / "folder", {}, "")


@pytest.mark.parametrize("width", [40, 80])
def test_lists_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    session = Session(FakeEngine(["a"]), Settings(), system="Be brief. " * 9)
    session.ask("Q", Screen().renderer())
    run, said = commands(session)
    for line in ("/?", "/set", "/show", "/set top_p 0.5 think none"):
        run.run(line)
    listed, settings, about, changed = said
    assert changed == "top_p 0.5"
    assert all(one in listed for name, command in COMMANDS.items() for one in (name, *command.aliases))
    assert "temperature" in settings and "a fake" in about and "of 4096 tokens" in about and "not saved" in about
    assert max(len(line) for text in said for line in text.splitlines()) < width


@pytest.mark.parametrize(
    ("line", "name"),
    [("/rset", "/reset"), ("/claer", "/clear"), ("/exti", "/exit"), ("/regenerate", "/regen"), ("/cpoy", "/copy")],
)
def test_the_closest_command_is_named(line: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"expected {name}"):
        commands(Session(FakeEngine([]), Settings()))[0].run(line)


def test_undo_and_copy() -> None:
    engine = FakeEngine(["one", "two", "three"])
    session = Session(engine, Settings())
    run, said = commands(session)
    for word in ("copy", "undo"):
        with pytest.raises(UsageError, match="ask something first"):
            run.run(f"/{word}")
    for question in ("A", "B"):
        session.ask(question, Screen().renderer())
    assert run.run("/copy") and said[0] == "two"
    assert run.run("/undo") and said[-1] == "forgotten: B"
    session.ask("C", Screen().renderer())
    assert [m["content"] for m in session.messages] == ["A", "one", "C", "three"]


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is not false %}OPEN{% endif %}{#</think>#}"
)


@pytest.mark.parametrize(
    ("opened", "said", "thoughts", "answer"),
    [
        ("", "<think>\nhm\n</think>\n\nYes.", "hm", "Yes."),
        ("<think>\n", "hm\n</think>\n\nYes.", "hm", "Yes."),
        ("<think>\n", "hm, no", "hm, no", ""),
        ("", "Yes. <think>", "", "Yes. <think>"),
    ],
)
def test_thoughts_are_no_part_of_the_answer(opened: str, said: str, thoughts: str, answer: str) -> None:
    engine, screen = FakeEngine([said, said], template=THINKS.replace("OPEN", opened)), Screen()
    session = Session(engine, Settings())
    given = session.ask("Q", screen.renderer())
    assert (given.text, given.thoughts) == (answer, thoughts)
    shown = f"<think>\n{thoughts}\n</think>\n" + (f"\n{answer}" if answer else "") if thoughts else answer
    assert screen.text == shown
    assert session.messages[1].get("reasoning_content", "") == thoughts
    hidden = Screen()
    session.ask("Q", WithoutThoughts(hidden.renderer()))
    assert hidden.text == answer


def test_thinking_is_switched(tmp_path: Path) -> None:
    """A chat of a model that has the switch is loaded by one that has none."""
    engine = FakeEngine(["hm</think>Yes.", "hm"], template=THINKS.replace("OPEN", "<think>"))
    session = Session(engine, Settings().with_values({"think": True}))
    session.ask("Q", Screen().renderer())
    assert engine.thinking is True
    commands(session)[0].run("/set think off")
    assert session.ask("Q", Screen().renderer()).text == "hm" and engine.thinking is False
    session.save(tmp_path / "chat.json")
    other = Session(FakeEngine([]), Settings())
    other.load(tmp_path / "chat.json")
    assert other.messages == session.messages and other.settings.think is None
    for raw, think in ((False, True), (True, False)):
        with pytest.raises(UsageError, match="thinking"):
            Session(FakeEngine([]), Settings().with_values({"think": think}), raw=raw)


@pytest.mark.parametrize("line", ["hello", "/etc/hosts: what is it?", "/Users", "1/2", "//", "what is /help?"])
def test_questions_are_no_commands(line: str) -> None:
    assert not commands(Session(FakeEngine([]), Settings()))[0].run(line)


@pytest.mark.parametrize(
    "line",
    [
        "/",
        "/nonsense",
        "/reset now",
        "/save",
        "/load",
        "/load /nowhere/chat.json",
        "/set a",
        "/set top_k=x",
        "/set think off",
        "/set think high",
    ],
)
def test_bad_commands_change_nothing(line: str) -> None:
    session = Session(FakeEngine(["a"]), Settings())
    session.ask("Q", Screen().renderer())
    before = (session.messages, session.settings)
    with pytest.raises(UsageError) as caught:
        commands(session)[0].run(line)
    assert (session.messages, session.settings) == before and "\n" not in str(caught.value)


def test_set_is_all_or_nothing() -> None:
    session = Session(FakeEngine([]), Settings())
    with pytest.raises(UsageError):
        commands(session)[0].run("/set top_k=5 top_p=7")
    assert session.settings == Settings()


@pytest.mark.parametrize("allow", [False, True])
def test_control_tokens_in_messages_are_text_unless_allowed(allow: bool) -> None:
    engine = FakeEngine(["a"])
    Session(engine, Settings(), allow_control_tokens=allow).ask("<|im_end|>", Screen().renderer())
    assert engine.allowed is allow
