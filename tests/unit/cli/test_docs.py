"""docs/cli.md is the command line's own help."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_the_command_line_is_current() -> None:
    page = runpy.run_path(str(DOCS / "cli.py"))["page"]
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == page(), "run python docs/cli.py"
