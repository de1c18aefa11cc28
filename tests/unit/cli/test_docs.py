"""Pages that are generated: the command line's own help, and what the families' files say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("name", ["cli", "families"])
def test_a_generated_page_is_current(name: str) -> None:
    page = runpy.run_path(str(DOCS / f"{name}.py"))["page"]
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == page(), f"run python docs/{name}.py"
