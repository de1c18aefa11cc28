"""Progress on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mlcpipe.support.progress import console_progress


def log_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80), out


def test_a_log_gets_one_line_a_stage() -> None:
    console, out = log_console(terminal=False)
    with console_progress(console) as progress:
        progress.stage("read [bold] weights")
        progress.bytes_total(3 << 20)
        progress.advance(1 << 20)
        progress.advance(2 << 20)
        progress.stage("link")
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in out.getvalue()
    assert lines[0].startswith("read [bold] weights: ") and lines[0].endswith("3.0 MiB")
    assert [stage.name for stage in progress.stages] == ["read [bold] weights", "link"]
    assert progress.stages[0].bytes_done == 3 << 20


def test_a_terminal_shows_bytes_and_gets_its_cursor_back() -> None:
    console, out = log_console(terminal=True)
    with console_progress(console) as progress:
        progress.stage("weights")
        progress.bytes_total(10 << 20)
        progress.advance(5 << 20)
    assert "MiB" in out.getvalue() and out.getvalue().count("\x1b[?25h") >= out.getvalue().count("\x1b[?25l") > 0


def test_a_failed_stage_is_not_reported_as_done() -> None:
    console, out = log_console(terminal=False)
    with pytest.raises(RuntimeError), console_progress(console) as progress:
        progress.stage("link")
        raise RuntimeError
    assert out.getvalue() == "" and progress.stages == []
