"""One question and its answer: `--prompt`, text on stdin, `--json`."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlcpipe.cli.chat.renderer import PlainRenderer
from mlcpipe.cli.chat.screen import Screen
from mlcpipe.cli.chat.session import Answer, Session
from mlcpipe.cli.terminal import print_json, say, stderr_console
from mlcpipe.errors import MlcpipeError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe.runtime.sampling_params import Stats

MAX_STDIN_BYTES = 8 << 20  # more than a context of a million tokens holds
SILENCE_S = 0.5


def question_of(prompt: str | None, *, as_json: bool, console: Console) -> str | None:
    """The question to answer once: `--prompt`, stdin, or both in this order; None for a conversation on a terminal.

    Several lines of stdin are one prompt, which a note on `console` says if it might surprise.
    Raises UsageError if there is nothing to ask, or a conversation is impossible.
    """
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if prompt is None and interactive:
        _require_terminal(as_json)
        return None
    piped = "" if sys.stdin is None or interactive else _read_stdin(wait=prompt is None)
    question = "\n\n".join(part for part in (prompt, piped) if part)
    if not question.strip():
        raise UsageError("there is nothing to ask", expected="--prompt TEXT, text on stdin, or a terminal")
    lines = piped.count("\n") + 1
    if prompt is None and lines > 1:
        say(console, f"The {lines} lines on stdin are one prompt.", style="dim")
    return question


def _read_stdin(wait: bool) -> str:
    """All of stdin. Without `wait`, a silent pipe is ignored: a script may have left it open."""
    if not wait and sys.platform != "win32" and not select.select([sys.stdin], [], [], SILENCE_S)[0]:
        return ""
    raw = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(raw) > MAX_STDIN_BYTES:
        raise UsageError("the text on stdin is too long", expected=f"at most {MAX_STDIN_BYTES >> 20} MiB")
    return raw.decode("utf-8", "replace").rstrip("\r\n")


def _require_terminal(as_json: bool) -> None:
    if as_json:
        raise UsageError("--json answers once", expected="--prompt TEXT or text on stdin")
    if not sys.stdout.isatty():
        raise UsageError(
            "a conversation needs a terminal", found="stdout that is none", next_step="ask once with --prompt TEXT"
        )


def ask_once(
    session: Session,
    question: str,
    describe: Callable[[Stats], str] | None,
    *,
    as_json: bool,
    hide_thinking: bool = False,
) -> None:
    """Print the answer to one question as text or JSON. Raises KeyboardInterrupt if Ctrl-C stopped it."""
    screen = Screen(hide_thinking=hide_thinking)
    answer = _answer_json(session, question) if as_json else _answer_text(session, question, screen, describe)
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt


def _answer_text(session: Session, question: str, screen: Screen, describe: Callable[[Stats], str] | None) -> Answer:
    try:
        answer = session.ask(question, screen.renderer())
    except MlcpipeError:
        screen.fresh_line()
        raise
    screen.fresh_line()
    if describe is not None and answer.stats is not None:
        say(stderr_console(), describe(answer.stats), style="dim")
    return answer


def _answer_json(session: Session, question: str) -> Answer:
    answer = session.ask(question, PlainRenderer(lambda text: None))  # the text is printed at the end
    stats = answer.stats
    speeds = ("prefill_tok_s", "decode_tok_s", "decode_gb_s")
    print_json(
        {
            "text": answer.text,
            "reasoning_content": answer.thoughts,
            "finish_reason": answer.finish_reason,
            "settings": session.settings.values(),
            "stats": None if stats is None else asdict(stats) | {name: getattr(stats, name) for name in speeds},
        }
    )
    return answer
