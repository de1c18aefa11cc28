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

from tests.conftest import Bundles
from tests.models.head_files import EAGLE, random_eagle, write_eagle
from tests.server.conftest import running_server

BODY = {"prompt": "hello", "max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
VOCAB, WIDTH = 3072, 256  # of the demo model
CONFIG = {**EAGLE, "hidden_size": WIDTH, "draft_vocab_size": 64}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_eagle(tmp_path_factory.mktemp("head"), random_eagle(VOCAB, CONFIG, WIDTH), CONFIG)


def test_answers_are_the_same(demo_bundles: Bundles, head: Path) -> None:
    found, drafted = [], []
    with_head = [demo_bundles.checkpoint, "--target", demo_bundles.target, "--draft-head", head]
    for options in ([demo_bundles["q4f16_1"]], with_head):
        with running_server(*options, "--threads", 1) as running:
            found.append(httpx2.post(f"{running.url}/v1/completions", json=BODY, timeout=60).json()["choices"])
            text = httpx2.get(f"{running.url}/metrics").text
            drafted += re.findall(r"^mlcpipe_spec_decode_num_draft_tokens_total (\S+)$", text, re.MULTILINE)
    assert found[0] == found[1] and found[0][0]["text"]
    assert float(drafted[0]) < float(drafted[1])


def test_what_cannot_draft_is_refused(demo_bundles: Bundles, head: Path, tmp_path: Path) -> None:
    model = demo_bundles.checkpoint
    (tmp_path / "medusa_lm_head.safetensors").touch()
    for options, said in (
        ([demo_bundles["q4f16_1"], "--draft-head", head], "a bundle takes no draft head"),
        ([model, "--draft-head", head, "--draft", "off"], "no --draft off"),
        ([model, "--draft-head", head, "--draft-model", model], "no --draft-model"),
        ([model, "--draft-head", tmp_path], "take an EAGLE-3 head"),
    ):
        command = [sys.executable, "-m", "mlcpipe", "serve", *map(str, options), "--port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode and said in done.stderr.replace("\n", " "), done.stderr
