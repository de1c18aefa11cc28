"""Tools, JSON and grammars: what comes out fits what was asked for, whatever the model would like to say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import pytest
from pydantic import BaseModel, ConfigDict, Field

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.full

from tests.server.conftest import NAME, Running

ASK = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": PARAMETERS}}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {**PARAMETERS, "properties": {"city": {"const": "Rome"}}, "required": ["city"]},
    },
}


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["yes", "no"]
    count: int = Field(ge=0, le=99)


class Open(BaseModel):
    """Its schema does not say that there are no other properties."""

    kind: Literal["yes", "no"]


@pytest.fixture(scope="module")
def ai(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(ai: Any, **more: Any) -> Any:
    return ai.chat.completions.create(model=NAME, messages=ASK, max_tokens=300, **{"temperature": 1, **more})


@pytest.mark.parametrize("seed", range(2))
def test_a_forced_call_fits_its_schema(ai: Any, seed: int) -> None:
    answer = ask(ai, tools=[WEATHER, CLOCK], tool_choice="required", seed=seed, parallel_tool_calls=False)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert call.function.name in ("weather", "clock")
    assert arguments["city"] in ("Paris", "Rome")
    assert set(arguments) == ({"city", "days"} if call.function.name == "weather" else {"city"})


def test_a_named_tool_is_called_and_streamed(ai: Any) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    with ask(ai, tools=[WEATHER, CLOCK], tool_choice=choice, temperature=0, stream=True) as stream:
        deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.name for call in deltas if call.function.name] == ["weather"]
    assert len(deltas) > 3  # arguments come as they are written
    assert json.loads("".join(call.function.arguments for call in deltas))["city"] in ("Paris", "Rome")


def test_the_input_of_a_custom_tool_fits_its_grammar(ai: Any) -> None:
    """Quotes, backslashes and line ends are escaped where the model writes them."""
    lines = 'start: line~2..3\nline: /["\\\\a-f]{1,4}/ LF\n%import common.LF\n'
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": lines}}
    tool = {"type": "custom", "custom": {"name": "draw", "format": grammar}}
    for seed in range(2):
        with ask(
            ai, tools=[tool, CLOCK], tool_choice={"type": "custom", "custom": {"name": "draw"}}, seed=seed, stream=True
        ) as stream:
            deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
        text = "".join(call.custom["input"] for call in deltas)
        assert re.fullmatch(r'(["\\a-f]{1,4}\n){2,3}', text), text


def test_logprobs_beside_a_grammar_are_numbers(client: httpx2.Client) -> None:
    body = {"messages": ASK, "regex": "[ab]", "max_tokens": 2, "logprobs": True, "top_logprobs": 20}
    (token,) = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    logprobs = [one["logprob"] for one in token["top_logprobs"]]
    assert min(logprobs) == -9999.0 < max(logprobs) <= 0


def test_a_conversation_with_calls_goes_on(ai: Any) -> None:
    first = ask(ai, tools=[WEATHER], tool_choice="required", temperature=0, parallel_tool_calls=False)
    said = first.choices[0].message
    result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
    messages = [*ASK, said.model_dump(exclude_none=True), result]
    after = ai.chat.completions.create(model=NAME, messages=messages, tools=[WEATHER], max_tokens=20, temperature=0)
    assert after.choices[0].message.content
    assert after.usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_are_no_duty(ai: Any) -> None:
    answer = ask(ai, tools=[WEATHER], temperature=0)
    assert answer.choices[0].message.content
    plain = ask(ai, tools=[WEATHER], tool_choice="none", temperature=0)
    assert plain.usage.prompt_tokens == ask(ai, temperature=0).usage.prompt_tokens


@pytest.mark.parametrize("seed", range(2))
def test_parsed_answers_are_objects(ai: Any, seed: int) -> None:
    answer = ai.chat.completions.parse(
        model=NAME, messages=ASK, response_format=Answer, temperature=1, seed=seed, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_json_object_regex_and_grammar(ai: Any) -> None:
    extras = (
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"grammar": 'start: "x" ("," "y")*\n'}, "x(,y)*"),
    )
    for extra, expression in extras:
        text = ask(ai, extra_body=extra, seed=1).choices[0].message.content
        assert re.fullmatch(expression, text), text
    answer = ask(ai, response_format={"type": "json_object"}, temperature=0, logit_bias={})
    text = answer.choices[0].message.content
    assert text.startswith("{")
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(text), dict)


def test_an_answer_is_a_call_or_fits_the_form(ai: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    for seed in range(3):
        message = ask(ai, tools=[WEATHER], response_format=form, seed=seed).choices[0].message
        assert message.tool_calls or Answer.model_validate_json(message.content)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "king"}}}}, "king"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"unevaluatedItems": False}}}}, "unevaluatedItems"),
        ({"regex": "("}, "regular expression"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"regex": "a", "grammar": 'start: "a"'}, "one of them"),
        ({"regex": "a{1000000}{1000000}"}, "simpler"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": "sometimes", "tools": [WEATHER]}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool"),
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"unevaluatedItems": 1}}}], "tool_choice": "required"}, "unevaluatedItems"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(client: httpx2.Client, body: dict[str, Any], words: str) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 5, **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_schemas_that_are_not_strict_may_have_anything(client: httpx2.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "unevaluatedItems": 1}}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required", "max_tokens": 5}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_langchain(server: Running) -> None:
    chat_openai = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat_openai(base_url=f"{server.url}/v1", api_key="none", model=NAME, max_tokens=200, seed=3, max_retries=0)
    assert isinstance(model.with_structured_output(Answer, method="json_schema").invoke("yes or no?"), Answer)
    # A weak model would invent properties of objects that are open, as it does not say strict.
    assert isinstance(model.with_structured_output(Open, method="function_calling").invoke("yes or no?"), Open)
    called = model.bind_tools([WEATHER], tool_choice="weather").invoke("weather?")
    assert called.tool_calls[0]["name"] == "weather"
    assert "".join(chunk.content for chunk in model.stream("Hello"))
