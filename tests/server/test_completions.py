"""`/v1/completions`, `/tokenize` and `/detokenize`, with OpenAI's client and a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import NAME, Running

if TYPE_CHECKING:
    from mlcpipe import Engine

TEXT = "The targets are"


@pytest.fixture(scope="module")
def ai(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    from mlcpipe import SamplingParams

    return demo.generate(TEXT, sampling=SamplingParams(temperature=0), max_tokens=12).text


def ask(ai: Any, **more: Any) -> Any:
    return ai.completions.create(**{"model": NAME, "prompt": TEXT, "temperature": 0, "max_tokens": 12, **more})


def test_a_text_is_continued_as_the_engine_does(ai: Any, demo: Engine, expected: str) -> None:
    assert ask(ai).choices[0].text == expected
    assert ask(ai, prompt=demo.tokenizer.encode(TEXT)).choices[0].text == expected
    assert ask(ai, echo=True).choices[0].text == TEXT + expected
    assert len(ask(ai, max_tokens=None).choices[0].text) > 0


def test_many_prompts_have_answers_in_their_order(ai: Any, demo: Engine, expected: str) -> None:
    prompts = ["Weights are", TEXT, "A bundle"]
    many = ask(ai, prompt=prompts, n=2)
    assert [choice.index for choice in many.choices] == list(range(6))
    assert many.choices[2].text == many.choices[3].text == expected
    assert many.usage.prompt_tokens == sum(len(demo.tokenizer.encode(one)) for one in prompts)
    same = ask(ai, prompt=[demo.tokenizer.encode(one) for one in prompts])
    assert [one.text for one in same.choices] == [one.text for one in many.choices[::2]]


def test_a_stream_is_the_same_text(ai: Any, expected: str) -> None:
    with ask(ai, stream=True, echo=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT + expected
    assert chunks[-1].choices[0].finish_reason == "length"


def test_logprobs_are_lists_side_by_side(ai: Any, expected: str) -> None:
    choice = ask(ai, logprobs=2).choices[0]
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == expected
    assert [expected[offset:].startswith(token) for offset, token in zip(logprobs.text_offset, logprobs.tokens)]
    assert all(max(top.values()) == logprob for top, logprob in zip(logprobs.top_logprobs, logprobs.token_logprobs))


def test_what_the_model_lacks_is_refused(client: httpx2.Client) -> None:
    for body, words in (
        ({"suffix": "b"}, "fill in the middle"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "token"),
        ({"prompt": ["a"] * 65}, "64"),
        ({"prompt": [99999]}, "token"),
        ({"prompt": [-1]}, "token"),
        ({"prompt": "a", "n": 0}, "n"),
    ):
        answer = client.post("/v1/completions", json={"prompt": TEXT, **body})
        assert answer.status_code == 400, body
        assert words in answer.json()["error"]["message"], body


def test_tokens_and_texts_are_inverse(client: httpx2.Client, demo: Engine) -> None:
    text = "Tiefe Töne <|im_end|> 漢字"
    made = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["tokens"] == demo.tokenizer.encode(text)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 2048)
    assert client.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == text
    chat = [{"role": "user", "content": "hi"}]
    told = client.post("/tokenize", json={"messages": chat}).json()["tokens"]
    assert told == demo.tokenizer.encode_chat(chat)
    assert client.post("/detokenize", json={"tokens": [1 << 40]}).status_code == 400
    assert client.post("/tokenize", json={}).status_code == 400
