"""llama-server's times and progress on the paths of OpenAI, mixed prompts, norms, and scales of adapters."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.answers import Delta
from mlcpipe.server.errors import ApiError
from mlcpipe.server.llama_cpp.embedding import normalized
from mlcpipe.server.mixed_prompts import listed_prompts, mixed_ids
from mlcpipe.server.timings import PromptProgress
from tests.unit.server.fake_engine import FakeEngine, answers

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}]}, TEXT: {"prompt": "Hello"},
}  # fmt: skip


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
def test_times_are_in_answers_and_at_the_end_of_streams(path: str) -> None:
    engine = FakeEngine("One two")
    usage, each = (
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "timings_per_token": True},
    )
    whole, plain, used, timed = answers(
        engine, *((path, {**BODIES[path], **more}) for more in ({}, {"stream": True, "n": 2}, usage, each))
    )
    made = whole.json()
    assert made["timings"]["prompt_n"] == made["usage"]["prompt_tokens"]
    assert made["timings"]["predicted_n"] == made["usage"]["completion_tokens"]
    for stream in (plain, used):
        found = ["timings" in one for one in events(stream.text)]
        assert found == [False] * (len(found) - 1) + [True]
    assert "usage" in events(used.text)[-1] and events(used.text)[-1]["choices"] == []
    found = ["timings" in one for one in events(timed.text) if one["choices"][0].get("delta", {}).get("role") is None]
    assert len(found) > 1 and all(found)


def test_times_of_responses_are_where_llama_server_has_them() -> None:
    body = {"input": "Hello", "stream": True, "timings_per_token": True, "return_progress": True}
    stream, plain = answers(FakeEngine("One two"), (RESPONSES, body), (RESPONSES, {"input": "a", "stream": True}))
    made = events(stream.text)
    kinds = {one["type"] for one in made if "timings" in one}
    assert (
        kinds == {"response.in_progress", "response.output_text.delta", "response.completed"}
        and "timings" not in plain.text
    )
    (told,) = [one["prompt_progress"] for one in made if "prompt_progress" in one]
    assert told["processed"] == told["total"] == made[-1]["response"]["usage"]["input_tokens"]


def test_the_tokens_of_a_chat() -> None:
    engine = FakeEngine()
    body = {**BODIES[CHAT], "max_tokens": 3}
    counted, refused, _ = answers(
        engine, (f"{CHAT}/input_tokens", body), (f"{CHAT}/input_tokens", {**body, "audio": {}}), (CHAT, body)
    )
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": len(engine.asked[0].tokens)}
    assert refused.status_code == 400


def test_log_probabilities_of_responses_are_asked_for() -> None:
    engine, name = FakeEngine(), "message.output_text.logprobs"
    asked = ({}, {"include": [name]}, {"include": [name], "top_logprobs": 3}, {"top_logprobs": 21})
    found = answers(engine, *((RESPONSES, {"input": "a", **more}) for more in asked))
    assert [one.logprobs for one in engine.asked] == [None, 0, 3] and found[3].status_code == 400


def test_progress_only_grows_and_ends_once() -> None:
    progress, told = PromptProgress(100), []
    for delta in (Delta(0, progress=(16, 16)), Delta(0, progress=(16, 64)), Delta(0, progress=(0, 0)),
                  Delta(0, text="a"), Delta(0, text="b")):  # fmt: skip
        if (one := progress.told(delta)) is not None:
            told.append(tuple(one["prompt_progress"][name] for name in ("cache", "processed", "total")))
    assert told == [(16, 16, 100), (16, 64, 100), (0, 100, 100)]


def test_which_fields_of_a_prompt_are_several() -> None:
    for one in ("a", [1, 2], [1, "a", 2], {"prompt_string": "a"}, ["a", 1]):
        assert listed_prompts(one) == [one]
    for several in (["a", "b"], ["a", [1]], [[1], [2, "a"]], [{"prompt_string": "a"}, "b"], []):
        assert listed_prompts(several) is several


def test_a_mixed_prompt_has_the_tokens_of_its_parts() -> None:
    tokenizer = FakeEngine().tokenizer
    alone = tokenizer.encode("Hello")
    assert mixed_ids(tokenizer, [5, "Hello", 6], "input") == [5, *alone, 6]
    assert mixed_ids(tokenizer, ["Hello", 6], "input") == [*tokenizer.encode("Hello", add_special_tokens=True), 6]
    parts = {"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
    for same in ("Hello", {"prompt_string": "Hello"}, parts):
        assert mixed_ids(tokenizer, same, "input", around=False) == alone
    picture = {"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    for wrong in (5, [True], [1.5], {}, {"content": "a"}, {"content": []}, picture, {"content": [5]}):
        with pytest.raises(ApiError, match="input"):
            mixed_ids(tokenizer, wrong, "input")
    with pytest.raises(ApiError, match="multimodal_data"):
        mixed_ids(tokenizer, {"prompt_string": "a", "multimodal_data": ["x"]}, "input")


@pytest.mark.parametrize("norm", [1, 2, 3, 64])
def test_rows_have_length_1_in_their_norm(norm: int) -> None:
    rows = np.random.default_rng(3).normal(0, 5, (4, 33)).astype(np.float32)
    lengths = np.linalg.norm(normalized(rows, norm).astype(np.float64), norm, axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-5)


def test_other_norms() -> None:
    rows = np.array([[3, -4], [0, 0]], np.float32)
    np.testing.assert_array_equal(normalized(rows, -1), rows)
    np.testing.assert_allclose(normalized(rows, 0), [[24570, -32760], [0, 0]])
    np.testing.assert_array_equal(normalized(rows, 2)[1], [0, 0])


def test_scales_of_adapters_that_are_not_there() -> None:
    """Neither ignored nor loaded."""
    bodies = {**BODIES, RESPONSES: {"input": "a"}, "/completion": {"prompt": "a"},
              "/v1/messages": {**BODIES[CHAT], "max_tokens": 3}}  # fmt: skip
    engine = FakeEngine()
    for lora, status in (
        ([{"id": 0, "scale": 1}], 400),
        ([{"id": -1, "scale": 1}], 400),
        ([{"id": 0}], 400),
        ([], 200),
    ):
        found = answers(engine, *((path, {**body, "lora": lora}) for path, body in bodies.items()))
        assert [one.status_code for one in found] == [status] * len(bodies), lora
        assert status == 200 or all("lora" in one.json()["error"]["message"] for one in found)
    listed, none, wrong = answers(
        engine, ("/lora-adapters", None), ("/lora-adapters", []), ("/lora-adapters", [{"id": 0, "scale": 1}])
    )
    assert (listed.json(), none.json(), wrong.status_code) == ([], {"success": True}, 400)
