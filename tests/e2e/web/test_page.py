"""The chat page in headless Chromium: `page_scenarios.mjs` with a scripted engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlcpipe.web import Site
from tests.e2e.web.conftest import Run

FILE = "page_scenarios.mjs"
NAMES = re.findall(r"^  async (\w+)\(", Path(__file__).with_name(FILE).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_page(name: str, run: Run, scripted_site: Site) -> None:
    run(FILE, name, scripted_site)
