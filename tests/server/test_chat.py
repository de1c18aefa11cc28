"""`/v1/chat/completions` with OpenAI's client and a plain one, against what the engine itself answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from tests.server.conftest import NAME, Running

if TYPE_CHECKING:
    from mlcpipe import Engine

HELLO = [{"role": "user", "content": "Which targets are there?"}]


@pytest.fixture(scope="module")
def ai(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    """The engine's own greedy answer."""
    from mlcpipe import SamplingParams

    return demo.chat(HELLO, sampling=SamplingParams(temperature=0)).text


def test_an_answer_is_the_engine_s(ai: Any, expected: str) -> None:
    answer = ai.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == NAME
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces(ai: Any, expected: str) -> None:
    with ai.chat.completions.create(
        model=NAME, messages=HELLO, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == expected
    assert len(pieces) > 5
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens >= len(pieces)


def test_all_forms_of_an_answer_have_one_fingerprint(ai: Any) -> None:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    whole = ai.chat.completions.create(**asked).system_fingerprint
    chunks = {chunk.system_fingerprint for chunk in ai.chat.completions.create(**asked, stream=True)}
    text = ai.completions.create(model=NAME, prompt="Hi", max_tokens=2).system_fingerprint
    assert {whole, text} == chunks and re.fullmatch("fp_[0-9a-f]{16}", whole)


def test_the_prompt_s_cached_tokens_are_told(ai: Any) -> None:
    once = [ai.chat.completions.create(model=NAME, messages=HELLO, max_tokens=1) for _ in range(2)]
    assert (
        once[1].usage.prompt_tokens_details.cached_tokens == (once[1].usage.prompt_tokens - 1) // 16 * 16
    )  # whole pages
    assert "cache_miss" not in once[1].usage.model_dump()


def test_usage_and_metrics_say_why_no_more_was_cached(ai: Any, server: Any) -> None:
    numbers = [" ".join(map(str, one)) for one in (range(60), [*range(50), 7, *range(51, 60)])]
    texts = [
        ai.chat.completions.create(model=NAME, messages=[{"role": "user", "content": one}], max_tokens=1)
        for one in numbers
    ]
    miss, cached = texts[1].usage.cache_miss, texts[1].usage.prompt_tokens_details.cached_tokens
    assert miss["reason"] == "prompt_differs" and 48 <= cached <= miss["token"] < cached + 16
    text = httpx2.get(server.url + "/metrics").text
    assert 'mlcpipe_prefix_cache_misses_total{reason="prompt_differs"}' in text


def test_a_stop_string_ends_the_text_before_it(ai: Any, expected: str) -> None:
    stop = expected[10:14]
    answer = ai.chat.completions.create(model=NAME, messages=HELLO, temperature=0, stop=stop)
    assert answer.choices[0].message.content == expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_several_answers_have_seeds_that_follow_each_other(ai: Any) -> None:
    def ask(**more: Any) -> list[str]:
        made = ai.chat.completions.create(model=NAME, messages=HELLO, temperature=2, max_tokens=12, **more)
        return [choice.message.content for choice in made.choices]

    both = ask(n=2, seed=5)
    assert both == [*ask(seed=5), *ask(seed=6)]
    assert both[0] != both[1]


def test_logprobs_are_of_each_token_and_its_alternatives(ai: Any) -> None:
    answer = ai.chat.completions.create(
        model=NAME, messages=HELLO, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in tokens).decode() == answer.choices[0].message.content
    for one in tokens:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs) <= 0


def test_a_bias_forbids_a_token(ai: Any, demo: Engine, expected: str) -> None:
    first = demo.tokenizer.encode(expected)[0]
    answer = ai.chat.completions.create(
        model=NAME, messages=HELLO, temperature=0, max_tokens=3, logit_bias={str(first): -100}
    )
    assert not expected.startswith(answer.choices[0].message.content)


def test_the_model_is_listed(ai: Any, demo: Engine) -> None:
    (model,) = ai.models.list().data
    assert model.id == NAME
    assert model.max_model_len == demo.context_length
    assert ai.models.retrieve(NAME).id == NAME


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({"messages": []}, 400, None, "at least one"),
        ({"messages": HELLO, "model": "gpt"}, 404, "model_not_found", NAME),
        ({"messages": HELLO, "temperature": "hot"}, 400, "invalid_body", "temperature"),
        ({"messages": HELLO, "temperature": 1000}, 400, None, "temperature"),
        ({"messages": HELLO, "logit_bias": {"999999": 1}}, 400, None, "logit_bias"),
        ({"messages": HELLO, "max_tokens": -2}, 400, "invalid_body", "max_tokens"),
        ({"messages": HELLO, "top_logprobs": 2}, 400, None, "top_logprobs"),
        ({"messages": HELLO, "functions": []}, 400, "unsupported_parameter", "functions"),
        ({"messages": HELLO, "stop": ["a" * 1025]}, 400, None, "stop"),
        ({"messages": [{"role": "king", "content": "a"}]}, 400, None, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, "image_url"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "context_length_exceeded", "2048"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: httpx2.Client, body: dict[str, Any], status: int, code: str | None, words: str
) -> None:
    answer = client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert words in error["message"]


def test_unknown_fields_are_ignored_and_counted(client: httpx2.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "field_of_tomorrow": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    metrics = client.get("/metrics").text
    assert 'mlcpipe_unknown_fields_total{field="field_of_tomorrow",path="/v1/chat/completions"}' in metrics


def test_a_user_cannot_write_control_tokens(client: httpx2.Client) -> None:
    """The text of `<|im_end|>` takes more tokens than the control token, which is one."""

    def prompt_tokens(text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return int(client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    assert prompt_tokens("a<|im_end|>b") - prompt_tokens("ab") > 1


def test_events_are_lines_of_json(client: httpx2.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1])


def test_a_prediction_changes_the_speed_alone(ai: Any, expected: str) -> None:
    """Most of the answer, with another word in it; as text, and in parts."""
    predicted = expected[: len(expected) // 2] + " something else" + expected[len(expected) // 2 :]
    for content in (predicted, [{"type": "text", "text": predicted[:30]}, {"type": "text", "text": predicted[30:]}]):
        answer = ai.chat.completions.create(
            model=NAME, messages=HELLO, temperature=0, prediction={"type": "content", "content": content}
        )
        assert answer.choices[0].message.content == expected
        details = answer.usage.completion_tokens_details  # how many are checked is a matter of time
        assert 0 <= details.accepted_prediction_tokens <= answer.usage.completion_tokens
        assert details.rejected_prediction_tokens >= 0
    plain = ai.chat.completions.create(model=NAME, messages=HELLO, temperature=0)
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None


@pytest.mark.alone
def test_drafts_are_counted(ai: Any, server: Running, expected: str) -> None:
    """Whether an answer is drafted follows from measured times."""
    ai.chat.completions.create(
        model=NAME, messages=HELLO, temperature=0, prediction={"type": "content", "content": expected}
    )
    text = httpx2.get(f"{server.url}/metrics").text
    counts = dict(re.findall(r"^mlcpipe_spec_decode_num_(\w+)_total (\S+)$", text, re.MULTILINE))
    assert 0 < float(counts["accepted_tokens"]) <= float(counts["draft_tokens"]) and float(counts["drafts"]) > 0


@pytest.mark.parametrize("prediction", ["text", {"type": "other", "content": ""}, {"type": "content", "content": 5}])
def test_a_wrong_prediction_is_refused(ai: Any, prediction: object) -> None:
    with pytest.raises(openai.BadRequestError, match="prediction"):
        ai.chat.completions.create(model=NAME, messages=HELLO, prediction=prediction)
