"""`mlcpipe serve --draft-head`: the same answers, and what cannot draft is refused in words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.conftest import Bundles, TinyLlama
from tests.models.head_files import random_heads, write_heads
from tests.server.conftest import running_server

BODY = {"prompt": "hello", "max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads(tmp_path_factory.mktemp("head"), random_heads(TinyLlama().vocab_size))


def test_answers_are_the_same(tiny_bundles: Bundles, head: Path) -> None:
    found, drafted = [], []
    with_head = [tiny_bundles.checkpoint, "--target", tiny_bundles.target, "--draft-head", head]
    with_head += ["--quantization", "q4f16_1"]
    for options in ([tiny_bundles["q4f16_1"]], with_head):
        with running_server(*options, "--threads", 1) as running:
            found.append(httpx2.post(f"{running.url}/v1/completions", json=BODY, timeout=60).json()["choices"])
            text = httpx2.get(f"{running.url}/metrics").text
            drafted += re.findall(r"^mlcpipe_spec_decode_num_draft_tokens_total (\S+)$", text, re.MULTILINE)
    assert found[0] == found[1] and found[0][0]["text"]
    assert float(drafted[0]) < float(drafted[1])


def test_what_cannot_draft_is_refused(tiny_bundles: Bundles, head: Path, tmp_path: Path) -> None:
    model = tiny_bundles.checkpoint
    for options, said in (
        ([tiny_bundles["q4f16_1"], "--draft-head", head], "a bundle takes no draft head"),
        ([model, "--draft-head", head, "--draft", "off"], "no --draft off"),
        ([model, "--draft-head", head, "--draft-model", model], "no --draft-model"),
        ([model, "--draft-head", write_heads(tmp_path / "other", random_heads(32))], "is of another model"),
    ):
        command = [sys.executable, "-m", "mlcpipe", "serve", *map(str, options), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode and said in done.stderr.replace("\n", " "), done.stderr
