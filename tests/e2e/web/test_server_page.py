"""The chat page as `mlcpipe serve` sends it, in headless Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from bench.bench_serving import own_server
from tests.conftest import Bundles
from tests.e2e.web.conftest import Browser, scenario


@pytest.mark.full
def test_the_page_of_a_server(browser: Browser, real_page: Path, demo_bundles: Bundles) -> None:
    models = [f"{name}={demo_bundles['q4f16_1']}" for name in ("one", "two")]
    with own_server([*models, "--threads", "2", "--api-key", "secret"]) as url:
        scenario(browser, "server_scenarios.mjs", "asks_for_the_key_shows_figures_and_chats", url)
