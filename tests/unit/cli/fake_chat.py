"""The chat on a terminal with the scripted engine; tests run this file in a pseudo terminal."""

from __future__ import annotations

import sys
from pathlib import Path

from mlcpipe.cli.chat.repl import Repl
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.stats import stats_line
from tests.unit.cli.fake_engine import FakeEngine

ANSWERS = [
    "# Title\nFirst **answer**.",
    "endless " * 10_000,
    "\x1b[2JSecond \x1b]0;title\x07answer.\n```python\nprint(1)\n```",
    "Third answer.",
]

if __name__ == "__main__":
    engine = FakeEngine(list(ANSWERS), delay=0.002, context_length=10**6)
    session = Session(engine, Settings())
    Repl(session, Path(sys.argv[1]), lambda stats: stats_line(stats, 40.0, 10**9, 0), show_stats=True).run("Hi.")
