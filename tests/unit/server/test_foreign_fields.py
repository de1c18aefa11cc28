"""Fields of other servers are honoured as ours, or refused by name; none that changes an answer is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource
from mlcpipe.runtime.tools import choice_of
from mlcpipe.server.answer_form import constraint
from mlcpipe.server.chat import ChatBody
from mlcpipe.server.completions import CompletionBody
from mlcpipe.server.embeddings import EmbeddingBody
from mlcpipe.server.errors import ApiError
from mlcpipe.server.foreign_fields import HARMLESS, HONOURED, REFUSED
from mlcpipe.server.llama_cpp.embedding import EmbeddingBody as LlamaEmbeddingBody
from mlcpipe.server.messages import MessagesBody
from mlcpipe.server.responses import ResponsesBody
from mlcpipe.server.scoring import PoolingBody, RerankBody, ScoreBody
from tests.unit.server.fake_engine import FakeEngine, answers

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}}
JSON = GrammarSource("json_schema", json.dumps(SCHEMA))
ANY = GrammarSource("json_schema", '{"type": "object"}')
GBNF = 'root ::= "yes" | no\nno ::= [n] "o"{1,2}\n'
PATHS = {
    CHAT: {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
}


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, JSON),
        ({"response_format": {"type": "text"}}, None),
        ({"json_schema": SCHEMA}, JSON),
        ({"json_schema": json.dumps(SCHEMA)}, JSON),
        ({"guided_json": SCHEMA}, JSON),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}, "json_schema": SCHEMA}, JSON),
        ({"guided_json": json.dumps(SCHEMA)}, JSON),
        ({"guided_regex": "a+"}, GrammarSource("regex", "a+")),
        ({"guided_choice": ["a", 'b"']}, GrammarSource("lark", 'start: "a" | "b\\""')),
        ({"guided_grammar": 'start: "a"'}, GrammarSource("lark", 'start: "a"')),
        ({"guided_grammar": GBNF}, GrammarSource("gbnf", GBNF)),
        ({"grammar": GBNF}, GrammarSource("gbnf", GBNF)),
        ({"ebnf": GBNF}, GrammarSource("gbnf", GBNF)),
        ({"grammar": '?start: "a::="'}, GrammarSource("lark", '?start: "a::="')),
        ({"structured_outputs": {"json": SCHEMA}}, JSON),
        ({"structured_outputs": {"json_object": True}}, ANY),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSource("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, GrammarSource("lark", 'start: "a"')),
        ({"structured_outputs": {"grammar": GBNF}}, GrammarSource("gbnf", GBNF)),
        ({"structured_outputs": {}, "guided_json": None}, None),
    ],
)
def test_what_an_answer_must_match(fields: dict[str, Any], source: GrammarSource | None) -> None:
    body = ChatBody.model_validate({"messages": HELLO, **fields})
    assert constraint(body, body.response_format) == source


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"response_format": {"type": "json_object", "schema": {"type": "hiccup"}}}, "hiccup"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "schema"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= ("}, "grammar"),
        ({"grammar": "root ::= " + "(" * 5000}, "grammar"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern"),
        ({"guided_regex": "a", "json_schema": SCHEMA}, "json_schema, guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_what_it_cannot_be_held_to(fields: dict[str, Any], word: str) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, **fields}))
    assert (answer.status_code, engine.asked) == (400, []) and word in answer.json()["error"]["message"]


CHANGING = {
    "bad_words": ["a"], "tfs_z": 0.5, "dynatemp_range": 0.5, "lora": [{"id": 0, "scale": 0.5}],
    "skip_special_tokens": False, "chat_template": "a", "n_probs": 3, "guided_whitespace_pattern": "a",
    "stop_regex": "a", "lora_path": "a", "options": {"temperature": 0}, "format": "json", "think": True,
    "do_sample": False, "tool_prompt": "a", "sampling_seed": 1, "input_ids": [1], "parse_tool_calls": False,
    "repetition_detection": {"max_pattern_size": 9}, "logprob_token_ids": [5], "vllm_xargs": {"a": 1},
    "return_hidden_states": True, "session_params": {"id": "a"}, "custom_params": {"a": 1}, "grammar_lazy": True,
    "reasoning_budget_message": "Enough.",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_what_would_change_the_answer_is_refused_by_name(path: str) -> None:
    engine = FakeEngine()
    found = answers(engine, *((path, {**PATHS[path], name: value}) for name, value in CHANGING.items()))
    assert {one.status_code for one in found} == {400} and not engine.asked
    assert [one.json()["error"]["message"].partition(":")[0] for one in found] == [*CHANGING]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (EmbeddingBody, {"input": "a"}), (PoolingBody, {"input": "a"}), (ScoreBody, {"text_1": "a", "text_2": "b"}),
        (RerankBody, {"query": "a", "documents": ["b"]}), (LlamaEmbeddingBody, {"content": "a"}),
    ],
)  # fmt: skip
def test_what_would_change_embeddings_and_scores_is_refused_by_name(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    for name, value in {"use_activation": False, "add_special_tokens": False, "input_type": "query"}.items():
        with pytest.raises(ApiError, match=f"^{name}: not offered"):
            model.model_validate({**body, name: value})
    neutral = {"use_activation": True, "truncation_side": "right", "input_type": None, "user": "a", "own": 5}
    assert model.model_validate({**body, **neutral}).model_extra


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thinking_budget_tokens", 20), ("include_reasoning", False), ("reasoning_format", "none"),
        ("enable_thinking", False), ("separate_reasoning", False), ("prompt_logprobs", 1), ("echo", True),
        ("n_predict", 4), ("samplers", ["top_k"]), ("reasoning_budget_tokens", 20),
    ],
)  # fmt: skip
def test_what_one_path_honours_is_refused_on_others(name: str, value: Any) -> None:
    taken = [answers(FakeEngine(), (path, {**body, name: value}))[0] for path, body in PATHS.items()]
    refused = {path for path, one in zip(PATHS, taken) if one.status_code == 400}
    assert {"/v1/responses", "/v1/messages"} <= refused < {*PATHS}
    assert all(one.json()["error"]["message"].startswith(f"{name}: ") for one in taken if one.status_code == 400)


@pytest.mark.parametrize(("path", "model"), [*zip(PATHS, (ChatBody, CompletionBody, ResponsesBody, MessagesBody))])
def test_no_path_ignores_what_another_honours(path: str, model: type[BaseModel]) -> None:
    others = sorted(HONOURED - {*model.model_fields, "stream_options"})
    assert others
    engine = FakeEngine()
    found = answers(engine, *((path, {**PATHS[path], name: [{"a": 5}]}) for name in others))
    named = [one.json()["error"]["message"].partition(":")[0] for one in found]
    assert named == others and not engine.asked
    empty = answers(engine, *((path, {**PATHS[path], name: None}) for name in others))
    assert {one.status_code for one in empty} == {200}


def test_a_count_takes_the_body_of_its_request() -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    body = {**PATHS["/v1/messages"], "stop_sequences": ["a"], "output_config": form}
    (counted,) = answers(FakeEngine(), ("/v1/messages/count_tokens", body))
    assert counted.status_code == 200 and counted.json()["input_tokens"] > 0


def test_the_table_holds_each_field_once() -> None:
    ours = {alias for model in (ChatBody, CompletionBody, ResponsesBody, MessagesBody) for alias in model.model_fields}
    assert ours >= HONOURED and not ours & HARMLESS and not HARMLESS & REFUSED.keys()
    assert REFUSED.keys() & HONOURED == REFUSED.keys() & ours


def test_what_changes_nothing_is_taken() -> None:
    fields = {"min_tokens": 0, "typical_p": 1.0, "mirostat": 0, "top_n_sigma": -1, "lora": [], "n_predict": -1}
    fields |= {"bad_words": None, "skip_special_tokens": True, "reasoning_format": "auto", "cache_prompt": True}
    fields |= {"repeat_last_n": 64, "repeat_penalty": 1.0, "options": {}, "do_sample": True, "grammar": "", "regex": ""}
    engine = FakeEngine()
    bodies = [(path, {**body, **fields}) for path, body in PATHS.items()]
    assert [one.status_code for one in answers(engine, *bodies)] == [200] * len(PATHS)
    refused = (CHAT, {"messages": HELLO, **fields, "repeat_penalty": 1.1})
    around = [
        ("/v1/completions", {"prompt": "a", "add_special_tokens": True}),
        (CHAT, {"messages": HELLO, "add_special_tokens": True}),
    ]
    assert [one.status_code for one in answers(engine, refused, *around)] == [400, 200, 400]


def test_what_another_of_our_apis_has_is_not_ignored() -> None:
    fields = {
        "response_format": {"type": "json_object"},
        "continue_final_message": True,
        "reasoning_effort": "low",
    }
    asked = [
        (path, {**PATHS[path], name: value})
        for path in ("/v1/responses", "/v1/messages")
        for name, value in fields.items()
    ]
    found = [one.json()["error"]["message"].partition(":")[0] for one in answers(FakeEngine(), *asked)]
    assert found == 2 * [*fields]


def test_other_names_of_what_is_offered() -> None:
    engine = FakeEngine()
    body = {"messages": HELLO, "repeat_penalty": 1.25, "stop_token_ids": [7, 9]}
    asked = [(CHAT, body), (CHAT, {**body, "repetition_penalty": 1.5, "ignore_eos": True})]
    assert [one.status_code for one in answers(engine, *asked)] == [200, 200]
    assert [one.sampling.repetition_penalty for one in engine.asked] == [1.25, 1.5]
    assert [one.stop_ids for one in engine.asked] == [engine.tokenizer.eos_token_ids | {7, 9}, {7, 9}]


def test_allowed_tools_leave_some() -> None:
    tools = [{"function": {"name": name}} for name in ("f", "g", "h")]
    for mode, named in (("auto", tools[:2]), ("required", tools[1:])):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        found = choice_of(tools, choice)
        assert [tool.name for tool in found.tools] == [one["function"]["name"] for one in named]
        assert found.forced == (mode == "required")


def test_answers_to_all_prompts_share_one_grammar() -> None:
    engine = FakeEngine()
    asked = {"prompt": ["a", "b"], "n": 2, "regex": "a+"}
    assert [one.status_code for one in answers(engine, ("/v1/completions", asked))] == [200]
    assert len(engine.asked) == 4 and len({id(one.grammar) for one in engine.asked}) == 1
    answers(engine, ("/v1/completions", asked))
    assert engine.asked[4].grammar is not engine.asked[0].grammar is not None


def test_llama_cpp_s_grammars() -> None:
    engine = FakeEngine()
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size)
    matcher = compiler.compile(GrammarSource("gbnf", GBNF)).matcher()
    for token in engine.tokenizer.encode("noo"):
        matcher.accept(token)
    assert matcher.ended
