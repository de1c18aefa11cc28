"""`/v1/responses` with OpenAI's client, and with bodies as Codex CLI sends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import httpx2
import pytest
from pydantic import BaseModel

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import NAME, Running
from tests.unit.server.tools import PATCH_GRAMMAR

if TYPE_CHECKING:
    from mlcpipe import Engine

QUESTION = "Which targets are there?"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"enum": ["ls", "pwd"]}, "minItems": 1, "maxItems": 2}}, "required": ["command"], "additionalProperties": False},
}  # fmt: skip


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


@pytest.fixture(scope="module")
def ai(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    from mlcpipe import SamplingParams

    return demo.chat([{"role": "user", "content": QUESTION}], sampling=SamplingParams(temperature=0)).text


def test_an_answer_is_the_engine_s(ai: Any, expected: str) -> None:
    answer = ai.responses.create(model=NAME, input=QUESTION, temperature=0)
    assert (answer.output_text, answer.status) == (expected, "completed")
    items = ai.responses.create(model=NAME, input=[{"role": "user", "content": QUESTION}], temperature=0)
    assert items.output_text == expected
    cut = ai.responses.create(model=NAME, input=QUESTION, temperature=0, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_a_stream_has_its_events_in_order(ai: Any, expected: str) -> None:
    with ai.responses.create(model=NAME, input=QUESTION, temperature=0, stream=True) as stream:
        events = list(stream)
    kinds = [one.type.removeprefix("response.") for one in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == expected
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].response.output_text == expected


def test_parsed_answers_and_calls(ai: Any) -> None:
    parsed = ai.responses.parse(model=NAME, input=QUESTION, text_format=Verdict, temperature=0)
    assert parsed.output_parsed.answer in ("yes", "no")
    called = ai.responses.create(model=NAME, input=QUESTION, tools=[SHELL], tool_choice="required", temperature=0)
    assert json.loads(called.output[0].arguments)["command"][0] in ("ls", "pwd")
    with ai.responses.stream(
        model=NAME, input=QUESTION, tools=[SHELL], tool_choice="required", temperature=0
    ) as stream:
        final = stream.get_final_response() if stream.until_done() else None
    assert final.output[0].name == "shell"
    output = {"type": "function_call_output", "call_id": called.output[0].call_id, "output": "a.py"}
    after = [{"role": "user", "content": QUESTION}, *[one.model_dump() for one in called.output], output]
    assert ai.responses.create(model=NAME, input=after, tools=[SHELL], max_output_tokens=5).output


def test_a_stored_response_is_continued(ai: Any, client: httpx2.Client, expected: str) -> None:
    first = ai.responses.create(model=NAME, input=QUESTION, temperature=0, instructions="Be brief.")
    second = ai.responses.create(model=NAME, input="And now?", temperature=0, previous_response_id=first.id)
    whole = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.output_text},
             {"role": "user", "content": "And now?"}]  # fmt: skip
    same = ai.responses.create(model=NAME, input=whole, temperature=0, store=False)
    assert (second.output_text, second.usage.input_tokens) == (same.output_text, same.usage.input_tokens)
    assert second.previous_response_id == first.id and second.store and not same.store
    with ai.responses.create(
        model=NAME, input="a", previous_response_id=second.id, stream=True, max_output_tokens=3
    ) as events:
        third = [*events][-1].response
    assert (
        ai.responses.retrieve(third.id).output == third.output and third.usage.input_tokens > second.usage.input_tokens
    )
    assert ai.responses.retrieve(second.id) == second
    counted = ai.responses.input_tokens.count(model=NAME, input="And now?", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens
    items = [*ai.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [one.role for one in items] == ["user", "assistant", "user"]
    assert items[0].content[0].text == QUESTION and items[1].content[0].text == first.output_text
    ai.responses.delete(first.id)
    for ask in (
        lambda: ai.responses.retrieve(first.id),
        lambda: ai.responses.retrieve(same.id),
        lambda: ai.responses.create(model=NAME, input="a", previous_response_id=second.id),
        lambda: ai.responses.delete("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            ask()
    assert client.get(f"/v1/responses/{second.id}", params={"stream": True}).status_code == 400


def test_a_response_in_the_background(ai: Any, expected: str) -> None:
    with ai.responses.create(model=NAME, input=QUESTION, temperature=0, background=True, stream=True) as stream:
        first = next(iter(stream)).response
    assert first.background and first.status == "in_progress"
    with ai.responses.retrieve(first.id, stream=True, starting_after=1) as stream:  # as the connection was lost
        events = list(stream)
    assert events[0].sequence_number == 2 and events[-1].response.output_text == expected
    assert ai.responses.retrieve(first.id) == events[-1].response
    begun = ai.responses.create(model=NAME, input="Count", background=True, extra_body={"ignore_eos": True})
    stopped = ai.responses.cancel(begun.id)
    assert stopped.status == "cancelled" and ai.responses.retrieve(begun.id).status == "cancelled"


def test_a_conversation_on_the_server(ai: Any, expected: str) -> None:
    made = ai.conversations.create(metadata={"topic": "targets"})
    first = ai.responses.create(model=NAME, input=QUESTION, temperature=0, conversation=made.id)
    assert first.output_text == expected and first.conversation.id == made.id
    second = ai.responses.create(model=NAME, input="And now?", temperature=0, conversation=made.id)
    whole = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": expected},
             {"role": "user", "content": "And now?"}]  # fmt: skip
    same = ai.responses.create(model=NAME, input=whole, temperature=0)
    assert (second.output_text, second.usage.input_tokens) == (same.output_text, same.usage.input_tokens)
    items = [*ai.conversations.items.list(made.id, order="asc", limit=2)]  # page by page
    texts = [QUESTION, expected, "And now?", second.output_text]
    assert [one.content[0].text for one in items] == texts
    more = ai.conversations.items.create(made.id, items=[{"role": "user", "content": "Last"}])
    assert ai.conversations.items.retrieve(more.data[0].id, conversation_id=made.id).content[0].text == "Last"
    assert ai.conversations.items.delete(more.data[0].id, conversation_id=made.id).id == made.id
    assert ai.conversations.update(made.id, metadata={"a": "b"}).metadata == {"a": "b"}
    assert ai.conversations.retrieve(made.id).metadata == {"a": "b"} and ai.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no conversation"):
        ai.conversations.retrieve(made.id)


def test_a_compacted_conversation_continues(ai: Any) -> None:
    history = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "They are many. " * 60}]
    made = ai.responses.compact(model=NAME, input=history, instructions="Be brief.")
    assert [one.type for one in made.output] == ["message", "compaction"] and made.usage.output_tokens > 1
    compacted = [one.model_dump(exclude_none=True, warnings=False) for one in made.output]
    after = ai.responses.create(
        model=NAME, input=[*compacted, {"role": "user", "content": "More, please"}], max_output_tokens=3
    )
    assert after.output


def test_log_probabilities_of_a_response(ai: Any, client: httpx2.Client) -> None:
    asked = {"model": NAME, "temperature": 0, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    made = ai.responses.create(input=QUESTION, max_output_tokens=6, **asked).output[0].content[0]
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 6, "logprobs": True}
    chat = client.post("/v1/chat/completions", json={**body, "top_logprobs": 2}).json()["choices"][0]
    found = [(one.token, one.logprob, [other.logprob for other in one.top_logprobs]) for one in made.logprobs]
    told = chat["logprobs"]["content"]
    assert found == [
        (one["token"], one["logprob"], [other["logprob"] for other in one["top_logprobs"]]) for one in told
    ]
    assert len(found) == 6 and "".join(one.token for one in made.logprobs) == made.text
    with ai.responses.create(input=QUESTION, max_output_tokens=6, stream=True, **asked) as stream:
        deltas = [one for one in stream if one.type == "response.output_text.delta"]
    assert [token.logprob for one in deltas for token in one.logprobs] == [one[1] for one in found]


def test_what_is_not_offered_is_refused(client: httpx2.Client) -> None:
    for change in (
        {"prompt": {"id": "p"}},
        {"background": True, "store": False},
        {"input": []},
        {"input": 3},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ):
        answer = client.post("/v1/responses", json={"input": QUESTION, **change})
        assert answer.status_code == 400, change
        assert answer.json()["error"]["message"]


def codex() -> dict[str, Any]:
    """A request in the form of Codex CLI's: items of every kind, and tools that are no functions."""
    return {
        "model": NAME,
        "instructions": "You are Codex, based on GPT-5. You run on a user's computer.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>…"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
            {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin Patch"},
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        ],
        "tools": [SHELL, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}}, {"type": "web_search"}, {"type": "local_shell"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
    }  # fmt: skip


def test_codex_s_requests(client: httpx2.Client) -> None:
    headers = {"originator": "codex_cli_rs", "session_id": "0199", "accept": "text/event-stream"}
    with client.stream("POST", "/v1/responses", json={**codex(), "max_output_tokens": 60}, headers=headers) as answer:
        assert answer.status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert events[-1]["response"]["output"]
