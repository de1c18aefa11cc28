"""`/v1/messages` with Anthropic's client, and with bodies as Claude Code sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("fastapi")
pytestmark = pytest.mark.full

from tests.server.conftest import NAME, Running

if TYPE_CHECKING:
    from mlcpipe import Engine

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
HELLO = [{"role": "user", "content": "Which targets are there?"}]
READ = {
    "name": "Read",
    "description": "Reads a file",
    "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"], "additionalProperties": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(demo: Engine) -> str:
    from mlcpipe import SamplingParams

    return demo.chat(HELLO, sampling=SamplingParams(temperature=0)).text


def test_an_answer_is_the_engine_s(claude: Any, expected: str) -> None:
    answer = claude.messages.create(model=NAME, max_tokens=100, messages=HELLO, **GREEDY)
    assert answer.content[0].text == expected
    assert answer.stop_reason == "end_turn"
    with claude.messages.stream(model=NAME, max_tokens=100, messages=HELLO, **GREEDY) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.usage.output_tokens == answer.usage.output_tokens
    prompt = [one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (answer, final)]
    count = claude.messages.count_tokens(model=NAME, messages=HELLO)
    assert prompt == [count.input_tokens] * 2


def test_how_an_answer_ended(claude: Any, expected: str) -> None:
    cut = claude.messages.create(model=NAME, max_tokens=2, messages=HELLO, **GREEDY)
    assert cut.stop_reason == "max_tokens"
    stop = expected[8:12]
    stopped = claude.messages.create(
        model=NAME, max_tokens=50, messages=HELLO, **GREEDY, stop_sequences=["never", stop]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == expected[: expected.index(stop)]


def test_calls_and_their_results(claude: Any) -> None:
    asked: dict[str, Any] = {"model": NAME, "max_tokens": 200, "messages": HELLO, "tools": [READ]}
    answer = claude.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "Read")
    assert call.input["path"] in ("a.py", "b.py")
    with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "Read"}) as stream:
        final = stream.get_final_message()
    assert final.content[0].input["path"] in ("a.py", "b.py")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "print(1)"}]}
    after = [*HELLO, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model=NAME, max_tokens=5, messages=after, tools=[READ]).content


def test_an_answer_that_has_begun_is_continued(claude: Any, expected: str) -> None:
    begun = [*HELLO, {"role": "assistant", "content": expected[:20]}]
    answer = claude.messages.create(model=NAME, max_tokens=100, messages=begun, **GREEDY)
    assert expected[:20] + answer.content[0].text == expected


def test_errors_have_anthropic_s_form(claude: Any, client: httpx2.Client) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude-9", max_tokens=5, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"
    for change in (
        {"max_tokens": -2},
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"system": [{"type": "image"}]},
        {"tool_choice": {"type": "never"}},
    ):
        answer = client.post("/v1/messages", json={"max_tokens": 5, "messages": HELLO, **change})
        assert (answer.status_code, answer.json()["type"]) == (400, "error"), change


def claude_code(nonce: str) -> dict[str, Any]:
    """A request in the form of Claude Code's: a line that changes first, blocks to cache, tools that Anthropic runs."""
    cached = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": NAME,
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_0_account__session_0"},
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={nonce};"},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **cached},
            {"type": "text", "text": "Use tools. " * 20, **cached},
        ],
        "tools": [READ, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "thinking": {"type": "enabled", "budget_tokens": 4000},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>…</system-reminder>"}, {"type": "text", "text": "list the files", **cached}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Reading."}, {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.py"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "print(1)", "is_error": False}, {"type": "text", "text": "go on"}]},
        ],
    }  # fmt: skip


def test_claude_code_s_requests(client: httpx2.Client) -> None:
    headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    cached = []
    for nonce in ("a1b2c", "d3e4f"):
        path = "/v1/messages?beta=true"
        body = {**claude_code(nonce), "max_tokens": 8}
        with client.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200
            lines = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
        assert (lines[0], lines[1], lines[-2:]) == ("message_start", "ping", ["message_delta", "message_stop"])
        whole = client.post(path, json={**body, "stream": False}, headers=headers).json()
        cached.append((whole["usage"]["cache_read_input_tokens"], whole["usage"]["input_tokens"]))
    assert 1 <= cached[1][1] <= 16  # the line that changes is not a part of the prompt; whole pages are found
    counted = client.post("/v1/messages/count_tokens?beta=true", json=claude_code("x"), headers=headers).json()
    assert counted["input_tokens"] == sum(cached[1])
