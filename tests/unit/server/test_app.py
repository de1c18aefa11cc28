"""Before a model is loaded, the server says so."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.app import create_app
from mlcpipe.server.guard import Rules
from mlcpipe.server.page import PAGE

PATHS = ("/health", "/v1/health", "/v1/models", "/metrics", "/")


def statuses(rules: Rules, paths: Sequence[str] = PATHS, page: Path = PAGE) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        _, guard = create_app(rules, page)
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return {path: await client.get(path) for path in paths}

    return asyncio.run(ask())


def test_a_server_that_loads_says_so() -> None:
    answers = statuses(Rules())
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(PATHS[:-1], 503) | {"/": 200}
    assert answers["/health"].json()["error"]["message"] == "Loading model"
    assert int(answers["/v1/models"].headers["retry-after"]) > 0


def test_the_key_comes_first() -> None:
    answers = statuses(Rules(keys=["k"]))
    expected = dict.fromkeys(PATHS[:2], 503) | dict.fromkeys(PATHS[2:-1], 401) | {"/": 200}
    assert {path: answer.status_code for path, answer in answers.items()} == expected
    assert answers["/v1/models"].headers["www-authenticate"] == "Bearer"


def test_the_page_comes_along_with_all_that_it_names() -> None:
    text = statuses(Rules(), ("/",))["/"].text
    named = [f"/{name}" for name in re.findall(r'(?:src|href)="\./([^"]+)"', text)]
    assert len(named) >= 4 and {answer.status_code for answer in statuses(Rules(), named).values()} == {200}


def test_the_page_knows_that_a_server_sent_it_and_needs_no_key(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    texts = {
        "index.html": '<!doctype html>\n<html lang="en">',
        "assets/index-1.js": "1",
        "icon.svg": "<svg/>",
        ".stamp": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    answers = statuses(Rules(keys=["k"]), ("/", *(f"/{name}" for name in texts), "/assets/../index.html"), tmp_path)
    assert answers["/"].text == '<!doctype html>\n<html data-server lang="en">'
    assert answers["/"].headers["content-security-policy"] == "frame-ancestors 'none'"
    assert answers["/assets/index-1.js"].headers["content-type"].startswith("text/javascript")
    assert "immutable" in answers["/assets/index-1.js"].headers["cache-control"]
    assert {path: answer.status_code for path, answer in answers.items() if answer.status_code != 200} == dict.fromkeys(
        ("/index.html", "/.stamp", "/assets/../index.html"), 401
    )


@pytest.mark.parametrize(
    ("embeds", "path", "why"),
    [
        (False, "/v1/embeddings", ": this model writes text; for embeddings run `mlcpipe serve` with an encoder"),
        (True, "/v1/chat/completions", ": this model embeds texts and writes none"),
        (True, "/api/chat", ": this model embeds texts and writes none"),
        (False, "/api/create", ""),
        (False, "/v1/nothing", ""),
    ],
)
def test_a_missing_path_says_why(embeds: bool, path: str, why: str) -> None:
    app, _ = create_app(Rules(), serves="embeddings" if embeds else "text")
    app.state.pool = SimpleNamespace(metrics=SimpleNamespace(count_rejected=lambda error: None))

    async def ask() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
            return await client.post(path)

    answer = asyncio.run(ask())
    error = answer.json()["error"]
    told = error if path.startswith("/api/") else error["message"]  # as Ollama
    assert answer.status_code == 404 and told == f"there is no POST {path}{why}"
