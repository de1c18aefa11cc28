"""The commands of docs/serving-clients.md run as they stand, and the dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from tests.server.conftest import Running

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "serving-clients.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def output(command: str, url: str) -> str:
    assert command.startswith("curl -s")
    address = command.replace("http://127.0.0.1:8000", url)
    done = subprocess.run(["bash", "-c", address], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs curl and bash")
def test_every_command_of_the_page_works(server: Running) -> None:
    models, whole, stream, tools, schema, metrics = [output(command, server.url) for command in COMMANDS]
    assert json.loads(models)["data"] and json.loads(whole)["choices"][0]["message"]["content"]
    assert stream.endswith("data: [DONE]\n\n")
    call = json.loads(tools)["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather" and json.loads(call["arguments"])["unit"] in ("C", "F")
    assert isinstance(json.loads(json.loads(schema)["choices"][0]["message"]["content"])["yes"], bool)
    assert "mlcpipe_num_requests_running" in metrics


def test_the_dashboard_asks_for_what_there_is(client: httpx2.Client) -> None:
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
    client.post("/v1/chat/completions", json={})  # refused
    there = set(re.findall(r"^(mlcpipe_\w+)", client.get("/metrics").text, re.MULTILINE))
    dashboard: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = [re.findall(r"mlcpipe_\w+", target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(asked) >= 10 and all(asked)
    assert {name for names in asked for name in names} <= there


def test_the_settings_of_codex_are_toml() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    provider = tomllib.loads(block)["model_providers"]["mlcpipe"]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8000/v1", "responses")
