"""Values that other servers take are taken, and mean the same; what would mean something else is refused."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.runtime.dry import BREAKERS, Dry, breakers_of
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.token_rules import TokenRules
from mlcpipe.runtime.truncation import Truncation
from tests.unit.server.fake_engine import FakeEngine, answers

CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "Hello"}]


def asked(fields: dict[str, Any]) -> tuple[Request, dict[str, Any]]:
    """What the engine is asked for, and the answer."""
    engine = FakeEngine()
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, **fields}))
    assert answer.status_code == 200, answer.text
    return engine.asked[0], answer.json()


@pytest.mark.parametrize(
    ("fields", "as_if"),
    [
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1}, {}),
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"max_tokens": "5"}, {"max_tokens": 5}),
        ({"temperature": "0.5"}, {"temperature": 0.5}),
        ({"temperature": " 1", "top_p": None}, None),
        ({"top_k": "40"}, {"top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"seed": 7.0}, {"seed": 7}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"stop": ""}, {}),
        ({"stop": ["", *map(str, range(100))]}, {"stop": [*map(str, range(100))]}),
        ({"logit_bias": [[5, 1.5], [7, False]]}, {"logit_bias": {"5": 1.5, "7": -100}}),
        ({"logit_bias": [["a", 1.5]]}, None),
        ({"messages": [*HELLO, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                       {"role": "function", "name": "f", "content": "3"}]},
         {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
                       {"role": "tool", "name": "f", "content": "3"}]}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"min_tokens": 0, "typical_p": 1, "xtc_probability": 0, "mirostat": 0, "dry_multiplier": 0.0}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_means_what_another_says(fields: dict[str, Any], as_if: dict[str, Any] | None) -> None:
    if as_if is None:
        (answer,) = answers(FakeEngine(), (CHAT, {"messages": HELLO, **fields}))
        assert answer.status_code == 400 and [*fields][0] in answer.json()["error"]["message"]
    else:
        (found, told), (expected, plain) = asked(fields), asked(as_if)
        for name in ("tokens", "max_tokens", "sampling", "stop_ids", "logprobs", "rules"):
            assert getattr(found, name) == getattr(expected, name)
        assert [one["message"] for one in told["choices"]] == [one["message"] for one in plain["choices"]]


def test_no_token_is_answered_where_none_is_wanted() -> None:
    for fields in ({"max_tokens": 0}, {"max_completion_tokens": 0}):
        found, told = asked({**fields, "logprobs": True})
        assert found.max_tokens == 1 and told["usage"]["completion_tokens"] == 0
        assert (told["choices"][0]["message"]["content"], told["choices"][0]["finish_reason"]) == ("", "length")


def test_a_mark_before_a_body_is_no_json_but_taken() -> None:
    (answer,) = answers(FakeEngine(), (CHAT, b"\xef\xbb\xbf" + json.dumps({"messages": HELLO}).encode()))
    assert answer.status_code == 200


def test_a_body_that_is_packed_is_refused_by_name() -> None:
    """As by other servers, which read no packed bodies either; one that says it is not packed is read."""
    engine, body = FakeEngine(), (CHAT, {"messages": HELLO})
    (packed,) = answers(
        engine, (CHAT, gzip.compress(json.dumps(body[1]).encode())), headers={"content-encoding": "gzip"}
    )
    assert packed.status_code == 415 and "content-encoding" in packed.json()["error"]["message"] and not engine.asked
    (plain,) = answers(engine, body, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


RULES = [
    ({"typical_p": 0.5}, TokenRules(truncation=Truncation(typical_p=0.5))),
    ({"top_n_sigma": 1.5}, TokenRules(truncation=Truncation(top_n_sigma=1.5))),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, TokenRules(truncation=Truncation(xtc_probability=0.5, xtc_threshold=0.2))),
    ({"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.3}, TokenRules(truncation=Truncation(mirostat=2, mirostat_tau=4, mirostat_eta=0.3))),
    ({"min_tokens": 4}, TokenRules(min_tokens=4)),
    ({"allowed_token_ids": [7, 9]}, TokenRules(allowed=frozenset((7, 9)))),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "rules"), RULES, ids=str)
def test_fields_are_rules(fields: dict[str, Any], rules: TokenRules) -> None:
    assert asked(fields)[0].rules == rules


def test_dry_s_breakers_are_those_given_or_llama_cpp_s() -> None:
    tokenizer = FakeEngine().tokenizer
    for more, texts in (({}, BREAKERS), ({"dry_sequence_breakers": ["a"]}, ["a"]), ({"dry_sequence_breakers": []}, [])):
        rules = asked({"dry_multiplier": 0.8, "dry_base": 2, "dry_penalty_last_n": 64, **more})[0].rules
        assert rules == TokenRules(dry=Dry(0.8, 2.0, 2, 64, breakers_of(tokenizer, texts)))


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 1.5}, {"xtc_probability": -1}, {"mirostat": 3}, {"mirostat_tau": -1}, {"dry_multiplier": -1},
        {"dry_penalty_last_n": -2}, {"dry_sequence_breakers": [""], "dry_multiplier": 1}, {"allowed_token_ids": []},
        {"allowed_token_ids": [1 << 40]}, {"min_tokens": -1}, {"prompt_logprobs": 21}, {"thinking_budget": -2},
        {"thinking": {"type": "a"}}, {"thinking": {"type": "enabled", "budget_tokens": "a"}}, {"max_tokens": -2},
        {"reasoning_effort": "a"}, {"prompt_logprobs": 1, "stream": True}, {"top_logprobs": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_name(fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, **fields}))
    assert answer.status_code == 400 and not engine.asked and [*fields][0] in answer.json()["error"]["message"]


def test_two_values_of_one_setting_are_refused() -> None:
    for fields in ({"thinking_budget": 3, "reasoning_budget": 4}, {"enable_thinking": True, "thinking": False}):
        (answer,) = answers(FakeEngine(), (CHAT, {"messages": HELLO, **fields}))
        assert answer.status_code == 400 and "expected one value" in answer.text
