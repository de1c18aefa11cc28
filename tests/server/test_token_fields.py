"""Fields about tokens, on the real application over the real engine with the demo model in float32."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("fastapi")

from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.app import create_app
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.service import Facts, Service
from tests.conftest import DEMO

if TYPE_CHECKING:
    from tests.conftest import Bundles

CHAT, TEXT = "/v1/chat/completions", "A bundle holds the weights of a model, and who reads"
HELLO = [{"role": "user", "content": "What does a bundle hold?"}]
ASKED = 8  # answers
THINKS = "{{ messages[-1].content }}\n<think>{# </think> #}"


@pytest.fixture(scope="module")
def engine(demo_bundles: Bundles) -> Iterator[Batching]:
    made = Batching(load_bundle(demo_bundles["q0f32"], 512), kv_tokens=2048)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO, generation_config={}, config=json.loads((DEMO / "config.json").read_text()))


@pytest.fixture
def thinking(tmp_path: Path) -> Tokenizer:
    """Another chat template, which opens thoughts."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(THINKS)
    return Tokenizer.load(tmp_path, generation_config={}, config=json.loads((DEMO / "config.json").read_text()))


def answered(engine: Batching, tokenizer: Tokenizer, *requests: tuple[str, dict[str, Any]]) -> list[Any]:
    """The responses to bodies that are posted together."""

    async def ask() -> list[Any]:
        app, guard = create_app()
        service = Service(engine, tokenizer, Facts(("demo",)))
        app.state.pool = ModelPool.of(service)
        transport = httpx2.ASGITransport(app=guard)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            got = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
        super(Service, service).close()  # its engine serves the next
        return list(got)

    return asyncio.run(ask())


def one(engine: Batching, tokenizer: Tokenizer, path: str, **body: Any) -> Any:
    (answer,) = answered(engine, tokenizer, (path, body))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def log_softmax() -> Any:
    """Log-probabilities f64[n, V] after each of n tokens, by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def compute(tokens: list[int]) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double()
        return np.asarray(torch.log_softmax(logits, -1).numpy())

    return compute


@pytest.mark.full
def test_texts_are_scored_as_transformers_does(engine: Batching, tokenizer: Tokenizer, log_softmax: Any) -> None:
    """As lm-evaluation-harness asks: echo, log-probabilities, one token of an answer."""
    prompts = [tokenizer.encode(TEXT), tokenizer.encode("The targets are")]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    made = one(engine, tokenizer, "/v1/completions", **body)
    for prompt, choice in zip(prompts, made["choices"], strict=True):
        expected = log_softmax(prompt)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(prompt) + 1
        scores = expected[np.arange(len(prompt) - 1), prompt[1:]]
        assert found["token_logprobs"][1:-1] == pytest.approx(scores.tolist(), abs=1e-3)
        assert found["token_logprobs"][-1] == pytest.approx(expected[-1].max(), abs=1e-3)
        best = [max(top.values()) for top in found["top_logprobs"][1:]]
        assert best == pytest.approx(expected.max(1).tolist(), abs=1e-3)
        assert "".join(found["tokens"]) == choice["text"]
    (stream,) = answered(engine, tokenizer, ("/v1/completions", {**body, "stream": True}))
    events = [json.loads(line[6:]) for line in stream.text.split("\n\n")[:-2]]
    for index, choice in enumerate(made["choices"]):
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values


@pytest.mark.full
def test_prompts_are_scored_for_vllm_s_clients(engine: Batching, tokenizer: Tokenizer, log_softmax: Any) -> None:
    (text,) = one(engine, tokenizer, "/v1/completions", prompt=TEXT, prompt_logprobs=3, max_tokens=0)["choices"]
    chat = one(engine, tokenizer, CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=2)
    assert (text["text"], text["finish_reason"]) == ("", "length")
    for tokens, found in (
        (tokenizer.encode(TEXT), text["prompt_logprobs"]),
        (tokenizer.encode_chat(HELLO), chat["prompt_logprobs"]),
    ):
        expected = log_softmax(tokens)
        assert found[0] is None and len(found) == len(tokens)
        for at, token in enumerate(tokens[1:]):
            own = found[at + 1][str(token)]
            assert own["logprob"] == pytest.approx(expected[at, token], abs=1e-3)
            assert own["rank"] == 1 + (expected[at] > expected[at, token]).sum()
    assert {len(place) for place in text["prompt_logprobs"][1:]} <= {3, 4}


def test_a_prompt_is_scored_once_for_all_its_answers(
    engine: Batching, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have the scores of one that is asked alone, also in a stream, and compute it once; there is a bound for all."""
    asked: list[Request] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request, wake: (asked.append(request), submit(request, wake))[1])
    path, body = "/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 1}
    alone = [one(engine, tokenizer, path, **body, seed=seed)["choices"][0] for seed in (5, 6, 7)]
    assert [request.prompt_logprobs for request in asked] == [2] * 3
    before = engine.stats()
    made = one(engine, tokenizer, path, **body, seed=5, n=3)["choices"]
    after = engine.stats()
    assert (after.prompt - after.cached) - (before.prompt - before.cached) == len(tokenizer.encode(TEXT))
    assert made == [{**choice, "index": index} for index, choice in enumerate(alone)]
    assert [request.prompt_logprobs for request in asked[3:]] == [2, None, None]
    (stream,) = answered(engine, tokenizer, (path, {**body, "seed": 5, "n": 3, "stream": True}))
    parts = [json.loads(line[6:])["choices"][0] for line in stream.text.split("\n\n")[:-2]]
    for index, choice in enumerate(made):
        for name, values in choice["logprobs"].items():
            mine = [part["logprobs"] for part in parts if part["index"] == index and part["logprobs"]]
            assert [value for each in mine for value in each[name]] == values
    many = {"prompt": [[5] * 500] * 64, "max_tokens": 1}
    for fields, name in (({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")):
        (refused,) = answered(engine, tokenizer, (path, {**many, **fields}))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        assert "expected at most 262144 log-probabilities" in refused.text and "found 672000" in refused.text


def test_only_allowed_tokens_come_and_no_end_too_early(engine: Batching, tokenizer: Tokenizer) -> None:
    allowed = tokenizer.encode(" the weights of a model")
    body = {"prompt": TEXT, "max_tokens": 20, "temperature": 1, "seed": 3, "logprobs": 0, "ignore_eos": True}
    (only,) = one(engine, tokenizer, "/v1/completions", **body, allowed_token_ids=allowed)["choices"]
    names = {tokenizer.token_bytes(token).decode() for token in allowed}
    assert len(only["logprobs"]["tokens"]) == 20 and {*only["logprobs"]["tokens"]} <= names
    (usual,) = one(engine, tokenizer, "/v1/completions", **body)["choices"]
    stops = {token for text in usual["logprobs"]["tokens"][:3] for token in tokenizer.encode(text)}
    for least in (0, 6):
        made = one(engine, tokenizer, "/v1/completions", **body, stop_token_ids=[*stops], min_tokens=least)
        assert (made["usage"]["completion_tokens"] > least) and (made["usage"]["completion_tokens"] <= 3) == (
            least == 0
        )
    banned = [[token, False] for token in tokenizer.encode(usual["text"])]
    (other,) = one(engine, tokenizer, "/v1/completions", **body, logit_bias=banned)["choices"]
    assert not {*tokenizer.encode(usual["text"])} & {*tokenizer.encode(other["text"])}


FIELDS: list[dict[str, Any]] = [
    {"typical_p": 0.3}, {"top_n_sigma": 0.7}, {"xtc_probability": 1, "xtc_threshold": 0.05}, {"mirostat": 2, "mirostat_tau": 2},
    {"mirostat": "1", "mirostat_tau": 2.0, "mirostat_eta": 0.5}, {"dry_multiplier": 90, "dry_base": 1.0, "dry_allowed_length": 0},
    {"repeat_penalty": 1.8},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_each_sampler_changes_the_answer_the_same_way_in_company(
    engine: Batching, tokenizer: Tokenizer, path: str
) -> None:
    body = {"messages": [{"role": "user", "content": "qqq"}]} if path == CHAT else {"prompt": TEXT}
    body |= {"max_tokens": 24, "seed": 5, "temperature": 2, "deterministic": True}

    def text(answer: Any) -> str:
        (choice,) = answer.json()["choices"]
        return str(choice["message"]["content"] if path == CHAT else choice["text"])

    requests = [(path, {**body, **fields}) for fields in [{}, *FIELDS]]
    alone = [text(answered(engine, tokenizer, request)[0]) for request in requests]
    assert [text(answer) for answer in answered(engine, tokenizer, *requests)] == alone
    assert alone[0] not in alone[1:]


def test_thoughts_end_at_their_budget(engine: Batching, thinking: Tokenizer) -> None:
    """The demo model would never close them."""
    tokenizer = thinking
    body = {"messages": HELLO, "max_tokens": 60, "temperature": 0}
    free = one(engine, tokenizer, CHAT, **body)
    assert free["choices"][0]["message"]["content"] == ""
    end = len(tokenizer.encode("</think>"))
    for fields in (
        {"thinking_budget": 7}, {"reasoning_budget_tokens": 7}, {"thinking": {"type": "enabled", "budget_tokens": 7}},
        {"reasoning": {"max_tokens": 7}},
    ):  # fmt: skip
        bound = one(engine, tokenizer, CHAT, **body, **fields)
        message = bound["choices"][0]["message"]
        assert free["choices"][0]["message"]["reasoning_content"].startswith(message["reasoning_content"])
        assert message["content"] and 7 <= bound["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 7 + end
    hidden = one(engine, tokenizer, CHAT, **body, thinking_budget=7, include_reasoning=False)["choices"][0]["message"]
    assert hidden == {name: value for name, value in message.items() if name != "reasoning_content"}
    inline = one(engine, tokenizer, CHAT, **body, thinking_budget=7, reasoning_format="none")["choices"][0]["message"]
    assert inline["content"].startswith(message["reasoning_content"]) and "</think>" in inline["content"]
    none = one(engine, tokenizer, CHAT, **body, thinking_budget=0)["choices"][0]["message"]
    assert "reasoning_content" not in none and none["content"]
    asked = {"type": "enabled", "budget_tokens": 7}
    thought, said = one(engine, tokenizer, "/v1/messages", **body, thinking=asked)["content"]
    assert (thought["thinking"], said["text"]) == (message["reasoning_content"], message["content"])
    asked = {"input": HELLO, "max_output_tokens": 60, "temperature": 0, "reasoning": {"max_tokens": 7}}
    thought, said = one(engine, tokenizer, "/v1/responses", **asked)["output"]
    assert thought["content"][0]["text"] == message["reasoning_content"]
    assert said["content"][0]["text"] == message["content"]
    form = {"response_format": {"type": "json_object"}}
    assert one(engine, tokenizer, CHAT, **body, **form, thinking_budget=7)["choices"][0]["message"]["content"][0] == "{"


def test_an_answer_continues_what_anthropic_s_clients_begin(engine: Batching, tokenizer: Tokenizer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "A bundle holds"}]
    body = {"max_tokens": 12, "temperature": 0}
    (block,) = one(engine, tokenizer, "/v1/messages", messages=begun, **body)["content"]
    same = one(engine, tokenizer, CHAT, messages=begun, continue_final_message=True, **body)
    assert block["text"] == same["choices"][0]["message"]["content"]
    assert block["text"] != one(engine, tokenizer, "/v1/messages", messages=HELLO, **body)["content"][0]["text"]


def test_closed_objects_end(engine: Batching, tokenizer: Tokenizer) -> None:
    """Open ones, which a schema may ask for, tempt a small model to invent properties."""
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    ended = {}
    for more in (False, True):
        form = {"type": "json_schema", "schema": {**schema, "additionalProperties": True} if more else schema}
        body = {"messages": HELLO, "max_tokens": 80, "temperature": 1, "seed": 1, "n": ASKED, "response_format": form}
        choices = one(engine, tokenizer, CHAT, **body)["choices"]
        ended[more] = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert len(ended[False]) == ASKED > len(ended[True])
    assert all(json.loads(choice["message"]["content"]).keys() == {"yes"} for choice in ended[False])
