"""`mlcpipe serve --draft-model`: the same answers, and what cannot draft is refused in words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.conftest import Bundles
from tests.server.conftest import Running, running_server

BODY = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 40,
    "temperature": 1,
    "seed": 3,
    "ignore_eos": True,
}


def test_answers_are_the_same(server: Running, demo_bundle: Path) -> None:
    expected = httpx2.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).json()["choices"]
    with running_server(demo_bundle, "--draft-model", demo_bundle, "--threads", 2) as running:
        found = httpx2.post(f"{running.url}/v1/chat/completions", json=BODY, timeout=60).json()["choices"]
        text = httpx2.get(f"{running.url}/metrics").text
    assert found == expected
    drafted = re.search(r"^mlcpipe_spec_decode_num_draft_tokens_total (\S+)$", text, re.MULTILINE)
    assert drafted is not None and float(drafted[1]) > 0


def test_what_cannot_draft_is_refused(demo_bundle: Path, tiny_bundles: Bundles, tmp_path: Path) -> None:
    for options, said in (
        (["--draft-model", tiny_bundles["q4f16_1"]], "the tokens of the model that it drafts for"),
        (["--draft-model", demo_bundle, "--draft", "off"], "no --draft off"),
        (["--draft-model", tmp_path / "absent"], "absent"),
    ):
        command = [sys.executable, "-m", "mlcpipe", "serve", str(demo_bundle), *map(str, options), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2 and said in done.stderr.replace("\n", " "), done.stderr
