"""llama-server's own API with the demo model, against what the engine itself answers."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import NAME

if TYPE_CHECKING:
    from mlcpipe import Engine

TEXT = "The targets are"


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    from mlcpipe import SamplingParams

    return demo.generate(TEXT, sampling=SamplingParams(temperature=0), max_tokens=12).text


def ask(client: httpx2.Client, **more: Any) -> Any:
    body = {"prompt": TEXT, "temperature": 0, "n_predict": 12, **more}
    answer = client.post("/completion", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx2.Client, **more: Any) -> list[Any]:
    answer = client.post(
        "/completion", json={"prompt": TEXT, "temperature": 0, "n_predict": 12, "stream": True, **more}
    )
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_text_is_the_engine_s(client: httpx2.Client, demo: Engine, expected: str) -> None:
    made = ask(client, return_tokens=True)
    assert (made["content"], made["stop_type"], made["tokens_predicted"]) == (expected, "limit", 12)
    assert demo.tokenizer.decode(made["tokens"]) == expected and made["prompt"] == TEXT
    assert made["tokens_evaluated"] == len(demo.tokenizer.encode(TEXT, add_special_tokens=True))
    timings = made["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == made["tokens_evaluated"] and timings["predicted_n"] == 12
    assert timings["predicted_per_second"] == pytest.approx(11000 / timings["predicted_ms"])
    settings = made["generation_settings"]
    assert (settings["temperature"], settings["n_predict"], made["model"]) == (0, 12, NAME)


def test_a_stream_is_the_same_in_pieces(client: httpx2.Client, expected: str) -> None:
    made = events(client, return_progress=True, timings_per_token=True)
    progress = [one["prompt_progress"] for one in made if "prompt_progress" in one]
    assert [one["processed"] for one in progress] == [0, progress[0]["total"]]
    first, last = (one["timings"] for one in made if "prompt_progress" in one)
    assert first["prompt_ms"] == first["prompt_n"] == 0 and last["prompt_n"] == progress[0]["total"]
    pieces = [one for one in made if not one["stop"] and "prompt_progress" not in one]
    assert "".join(one["content"] for one in pieces) == expected and len(pieces) > 5
    assert all("timings" in one for one in pieces)
    assert [one["stop"] for one in made] == [False] * (len(made) - 1) + [True]
    assert (made[-1]["content"], made[-1]["tokens_predicted"]) == ("", 12)


def test_words_and_ends(client: httpx2.Client, demo: Engine, expected: str) -> None:
    made = ask(client, stop=[expected[10:14]])
    assert made["content"] == expected[: expected.index(expected[10:14])]
    assert (made["stop_type"], made["stopping_word"]) == ("word", expected[10:14])
    assert ask(client, n_predict=-1)["stop_type"] == "eos" and not made["truncated"]
    full = ask(client, n_predict=-1, ignore_eos=True, prompt=[5] * (demo.context_length - 8))
    assert full["truncated"] and (full["stop_type"], full["tokens_predicted"]) == ("limit", 8)
    one = ask(client, n_predict=1)["timings"]
    assert (one["predicted_n"], one["predicted_per_second"], one["predicted_per_token_ms"]) == (1, 0, 0)
    assert ask(client, n_predict=0)["content"] == "" and events(client, n_predict=0)[-1]["tokens_predicted"] == 0
    first = demo.tokenizer.encode(expected)[0]
    text = demo.tokenizer.decode([first])
    assert not ask(client, logit_bias=[[text, False]])["content"].startswith(text)


def test_many_prompts_are_a_list(client: httpx2.Client, demo: Engine, expected: str) -> None:
    ids = demo.tokenizer.encode(TEXT, add_special_tokens=True)
    made = ask(client, prompt=["Weights are", [*ids[:1], *ids[1:]]], n_cmpl=2)
    assert [one["index"] for one in made] == [0, 1, 2, 3]
    assert made[2]["content"] == made[3]["content"] == expected and made[2]["tokens_predicted"] == 12
    last = [one for one in events(client, prompt=["Weights are", ids]) if one["stop"]]
    assert sorted(one["index"] for one in last) == [0, 1]


def test_probabilities_of_tokens(client: httpx2.Client) -> None:
    made = ask(client, n_probs=3, n_predict=4)["completion_probabilities"]
    assert len(made) == 4 and all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in made)
    pieces = [one for one in events(client, n_predict=4) if not one["stop"]]
    assert [token for one in pieces for token in one["tokens"]] == [one["id"] for one in made]


def test_probabilities_after_truncation(client: httpx2.Client) -> None:
    """Those before it, among the tokens that are left; the answer is the same."""
    sampled = {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 3, "n_probs": 20, "n_predict": 6}
    before, after = ask(client, **sampled), ask(client, **sampled, post_sampling_probs=True)
    assert after["content"] == before["content"] and after["generation_settings"]["post_sampling_probs"] is True
    for one, other in zip(before["completion_probabilities"], after["completion_probabilities"], strict=True):
        probs = {each["id"]: math.exp(each["logprob"]) for each in one["top_logprobs"]}
        first = {token: probs[token] / sum([*probs.values()][:5]) for token in [*probs][:5]}
        mass, left = 0.0, list[int]()
        for token in first:
            if mass < 0.9 and first[token] >= 0.05 * max(first.values()):
                left.append(token)
            mass += first[token]
        expected = {token: probs[token] / sum(probs[each] for each in left) for token in left}
        assert {each["id"]: each["prob"] for each in other["top_probs"]} == pytest.approx(expected, rel=1e-4)
        assert other["prob"] == pytest.approx(expected[other["id"]], rel=1e-4) and "logprob" not in other
    (greedy,) = ask(client, n_probs=3, n_predict=1, post_sampling_probs=True)["completion_probabilities"]
    assert greedy["prob"] == 1 and [each["prob"] for each in greedy["top_probs"]] == [1, 0, 0]
    assert greedy["top_probs"][0]["id"] == greedy["id"]


def test_fields_of_a_response(client: httpx2.Client, expected: str) -> None:
    made = ask(
        client, response_fields=["content", "timings/predicted_n", "generation_settings/temperature", "no/thing"]
    )
    assert made == {"content": expected, "timings/predicted_n": 12, "generation_settings/temperature": 0}


def test_an_answer_in_a_form(client: httpx2.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    assert isinstance(json.loads(ask(client, json_schema=schema, n_predict=60)["content"])["yes"], bool)
    assert ask(client, grammar='root ::= "a" [bc]')["content"] in ("ab", "ac")


def test_facts_of_the_server(client: httpx2.Client, demo: Engine) -> None:
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == demo.context_length
    assert props["chat_template"] == demo.tokenizer.chat_templates["default"] and props["eos_token"]
    slots = client.get("/slots").json()
    assert len(slots) == props["total_slots"] >= 1 and all(one["n_ctx"] == demo.context_length for one in slots)
    told = [{"role": "user", "content": "Hello"}]
    applied = client.post("/apply-template", json={"messages": told}).json()["prompt"]
    assert demo.tokenizer.encode(applied) == demo.tokenizer.encode_chat(told, add_generation_prompt=True)


def test_a_chat_tells_its_times_and_the_progress_of_its_prompt(client: httpx2.Client) -> None:
    """Before each part of the prompt that is computed, and at its end; what was computed before is not again."""
    text = "The targets of the compiler are many and the weights are quantized. " * 40
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True, "return_progress": True}
    counted = client.post("/v1/chat/completions/input_tokens", json=body).json()["input_tokens"]
    for path in ("/v1/chat/completions", "/v1/chat/completions", "/chat/completions"):
        answer = client.post(path, json={**body, "stream_options": {"include_usage": True}})
        made = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        told = [one["prompt_progress"] for one in made if "prompt_progress" in one]
        usage, timings = made[-1]["usage"], made[-1]["timings"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert {one["total"] for one in told} == {counted} == {usage["prompt_tokens"]}
        assert {one["cache"] for one in told} == {cached} and told[0]["processed"] == cached
        processed = [one["processed"] for one in told]
        assert processed == sorted(set(processed)) and processed[-1] == counted and len(processed) > 1
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (cached, counted - cached, 4)
    assert cached > counted // 2
