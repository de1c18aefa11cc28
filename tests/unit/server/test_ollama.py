"""Ollama's API over an engine that is a script: durations, thinking, who may ask, and how refusals look."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from mlcpipe.errors import ResourceError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import Rules
from mlcpipe.server.ollama.bodies import seconds_of
from tests.conftest import DEMO
from tests.unit.server.fake_engine import FakeEngine, answers

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/api/chat"
ASK = {"model": "demo", "messages": HELLO}
THINKS = """{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(300, 300), ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("250ms", 0.25), (0, 0), ("0", 0), ("0s", 0),
     (-1, math.inf), ("-1", math.inf), ("-1m", math.inf)],
)  # fmt: skip
def test_how_long_a_model_stays(given: float | str, seconds: float) -> None:
    assert seconds_of(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "soon", "5", "m", "5 m", "5mm5", "1e9", "1" * 50, "5m" * 50])
def test_what_is_no_duration(given: str) -> None:
    if given == "5":
        assert seconds_of(given) == 5
    else:
        with pytest.raises(ApiError, match="keep_alive"):
            seconds_of(given)


def test_thoughts_stand_apart_and_can_be_switched_off(tmp_path: Path) -> None:
    engine = FakeEngine("<think>Hm.</think>Yes.")
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": THINKS}))
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    config = json.loads((DEMO / "config.json").read_text())
    engine.tokenizer = Tokenizer.load(tmp_path, generation_config={}, config=config)
    whole, lines, off = answers(
        engine, *((CHAT, {**ASK, **more}) for more in ({"stream": False}, {"think": True}, {"think": False}))
    )
    message = whole.json()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "Yes.")
    parts = [json.loads(line)["message"] for line in lines.text.splitlines()]
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    assert "".join(part["content"] for part in parts) == "Yes."
    prompts = [engine.tokenizer.decode(one.tokens, skip_special_tokens=False) for one in engine.asked]
    assert off.status_code == 200 and prompts[2] == prompts[1] + "<think></think>" == prompts[0] + "<think></think>"


def test_an_answer_that_has_begun_is_continued() -> None:
    engine = FakeEngine(" 4")
    begun = {**ASK, "stream": False, "messages": [*HELLO, {"role": "assistant", "content": "2 + 2 is"}]}
    (answer,) = answers(engine, (CHAT, begun))
    assert answer.json()["message"]["content"] == " 4"
    assert engine.tokenizer.decode(engine.asked[0].tokens).endswith("2 + 2 is")


@pytest.mark.parametrize("path", ["/api/version", "/api/tags", "/api/ps"])
def test_the_guard_stands_before_all_paths(path: str) -> None:
    assert answers(FakeEngine(), (path, None), rules=Rules(keys=["k"]))[0].status_code == 401
    assert answers(FakeEngine(), (path, None), headers={"origin": "http://evil.com"})[0].status_code == 403
    refused = answers(FakeEngine(), (path, None), headers={"host": "evil.com"})[0]
    assert refused.status_code == 421 and isinstance(refused.json()["error"], str)


def test_refusals_are_texts_also_within_a_stream() -> None:
    (answer,) = answers(FakeEngine(fails=True), (CHAT, ASK))
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert json.loads(answer.text.splitlines()[-1]) == {"error": "the model computed NaN"}
    (answer,) = answers(FakeEngine(error=ResourceError("no room")), (CHAT, ASK))
    assert answer.status_code == 503 and answer.json() == {"error": "no room"}


def test_fields_of_ours_are_honoured_within_options_and_outside() -> None:
    engine = FakeEngine()
    asked = [{**ASK, "options": {"repeat_penalty": 1.25}}, {**ASK, "repeat_penalty": 1.25}, {**ASK, "tfs_z": 0.5}]
    found = answers(engine, *((CHAT, one) for one in asked))
    assert [one.status_code for one in found] == [200, 200, 400]
    assert [one.sampling.repetition_penalty for one in engine.asked] == [1.25, 1.25]
    inside = {**ASK, "options": {"model": "other"}}
    assert "options.model" in answers(engine, (CHAT, inside))[0].json()["error"]


def test_texts_as_they_are_have_one_answer() -> None:
    asked = {"model": "demo", "prompt": "a", "raw": True, "stream": False}
    wrong = [{"options": {"n": 2}}, {"n": 2}, {"suffix": "b", "options": {"suffix": "c"}}, {"stop": ["a"]}]
    engine = FakeEngine()
    for more in wrong:
        (answer,) = answers(engine, ("/api/generate", {**asked, **more}))
        assert answer.status_code == 400 and "leave it out" in answer.json()["error"]
    (answer,) = answers(engine, ("/api/generate", {**asked, "n": 1, "options": {"n": None, "stop": None}}))
    assert answer.json()["response"] == "Hello" and answer.json()["load_duration"] > 0


def test_calls_without_their_results_are_no_answer_that_has_begun() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "Let me see", "tool_calls": [call]}
    (answer,) = answers(FakeEngine(), (CHAT, {**ASK, "messages": [*HELLO, said]}))
    assert answer.status_code == 400 and "results of the tools" in answer.json()["error"]
