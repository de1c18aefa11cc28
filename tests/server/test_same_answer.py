"""One question, with the same settings and seed, from the command line, in Python and over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

pytest.importorskip("fastapi")

if TYPE_CHECKING:
    from mlcpipe import Engine

ASKED = [{"role": "user", "content": "What does a bundle hold, and who reads it?"}]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.3, "top_p": 0.95, "seed": 2**63 + 5},
    "penalties": {
        "temperature": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "seed": 6,
    },
}


def asked(demo: Engine, client: httpx2.Client, settings: dict[str, Any]) -> str:
    """The answer in Python, after comparing it with that over HTTP."""
    from mlcpipe import SamplingParams

    demo.reset()
    python = demo.chat(ASKED, sampling=SamplingParams(**settings), max_tokens=60)
    body = {**settings, "messages": ASKED, "max_tokens": 60, "deterministic": True}
    http = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (http["message"]["content"], http["finish_reason"]) == (python.text, python.finish_reason)
    return python.text


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_answer_everywhere(demo: Engine, demo_bundle: Path, client: httpx2.Client, name: str) -> None:
    settings = {"top_p": 1.0, **SETTINGS[name]}
    expected = asked(demo, client, settings)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "mlcpipe", "chat", str(demo_bundle), "-p", ASKED[0]["content"], "--no-stats"]
    chat = subprocess.run([*command, "--max-tokens=60", *options], check=True, capture_output=True, text=True).stdout
    assert chat.strip() == expected.strip()


def test_what_the_checkpoint_says_counts_the_same(demo: Engine, demo_bundle: Path, client: httpx2.Client) -> None:
    """Its generation_config.json takes the most probable tokens."""
    demo.reset()
    expected = demo.chat(ASKED, max_tokens=60).text
    assert expected == asked(demo, client, {"temperature": 0.0})
    body = {"messages": ASKED, "max_tokens": 60, "deterministic": True}
    assert client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == expected
    command = [sys.executable, "-m", "mlcpipe", "chat", str(demo_bundle), "-p", ASKED[0]["content"], "--no-stats"]
    chat = subprocess.run([*command, "--max-tokens=60"], check=True, capture_output=True, text=True).stdout
    assert chat.strip() == expected.strip()


def test_a_bias_counts_the_same(demo: Engine, client: httpx2.Client) -> None:
    """Which the command line cannot ask for."""
    settings = {"temperature": 1.0, "top_p": 1.0, "seed": 7}
    forbidden = demo.tokenizer.encode(asked(demo, client, settings))[:20]
    assert asked(demo, client, {**settings, "logit_bias": dict.fromkeys(forbidden, -100.0)})
