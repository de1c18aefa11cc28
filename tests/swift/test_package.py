"""The Swift package on Linux, with the native runtime: it answers as Python does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.compiler.swift_package import write_sources_of_package
from tests.conftest import Bundles
from tests.swift.swift import WORK, swift

HERE = Path(__file__).parent
QUESTIONS = ("Hello! What is a compiler?", "And what is a cat?", "Thank you.")
GREEDY = SamplingParams(temperature=0.0)


def expected(bundle: Path) -> dict[str, object]:
    """Greedy answers of Python to a conversation, which has its own answers in later prompts."""
    engine, chat, answers, texts = Engine(bundle, threads=1), [], [], []
    for question in QUESTIONS:
        chat.append({"role": "user", "content": question})
        answer = engine.chat(chat, sampling=GREEDY, max_tokens=60)
        chat.append({"role": "assistant", "content": answer.text})
        answers.append(answer.token_ids)
        texts.append(answer.text)
    messages = [{"role": "user", "content": question} for question in QUESTIONS]
    return {"bundle": f"file://{WORK}/bundle", "messages": messages, "answers": answers, "texts": texts}


@pytest.mark.everything
def test_swift_answers_as_python_does(demo_bundles: Bundles, tmp_path: Path) -> None:
    """`swift test` of a package that depends on ours: greedy tokens, cancel, close, errors, saved chats."""
    (tmp_path / "Mlcpipe").mkdir()
    write_sources_of_package(tmp_path / "Mlcpipe", "")
    shutil.copytree(HERE / "package", tmp_path / "tests")
    shutil.copytree(demo_bundles["q4f16_1"], tmp_path / "bundle")
    (tmp_path / "expected.json").write_text(json.dumps(expected(demo_bundles["q4f16_1"])))
    words = ["swift-test", "--package-path", f"{WORK}/tests"]
    said = swift(tmp_path, *words, MLCPIPE_EXPECTED=f"{WORK}/expected.json")
    assert "0 failures" in said and "warning:" not in said, said[-6000:]
