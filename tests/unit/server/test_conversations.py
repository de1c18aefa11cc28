"""Conversations on the server, and summaries of long ones: what a response continues, whose it is, and how much stays."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.compaction import asked, sealed
from mlcpipe.server.conversation_store import ConversationStore, items_bytes, kept_items
from mlcpipe.server.errors import ApiError
from mlcpipe.server.response_items import messages_of
from tests.unit.server.fake_engine import FakeEngine, answers, with_client

ALL, RESPONSES = "/v1/conversations", "/v1/responses"
HELLO = {"role": "user", "content": "Hello"}


def test_a_response_continues_a_conversation_and_is_added_to_it() -> None:
    engine = FakeEngine("One")

    async def work(client: httpx2.AsyncClient) -> list[dict[str, Any]]:
        made = (await client.post(ALL, json={"items": [HELLO], "metadata": {"a": "b"}})).json()
        for text in ("Count", "More"):
            asked = {"input": text, "conversation": {"id": made["id"]}, "store": text == "Count"}
            said = (await client.post(RESPONSES, json=asked)).json()
            assert said["conversation"] == {"id": made["id"]}
        counted = await client.post(f"{RESPONSES}/input_tokens", json={"conversation": made["id"], "input": "End"})
        assert counted.json()["input_tokens"] > len(engine.asked[1].tokens)
        plain = [HELLO, {"role": "user", "content": "Count"}, {"role": "assistant", "content": "One"},
                 {"role": "user", "content": "More"}]  # fmt: skip
        await client.post(RESPONSES, json={"input": plain})
        listed = (await client.get(f"{ALL}/{made['id']}/items?order=asc&limit=3")).json()
        assert listed["has_more"] and listed["first_id"] == listed["data"][0]["id"]
        rest = (await client.get(f"{ALL}/{made['id']}/items?order=asc&after={listed['last_id']}")).json()
        first = listed["data"][0]
        assert (await client.get(f"{ALL}/{made['id']}/items/{first['id']}")).json() == first
        assert (await client.delete(f"{ALL}/{made['id']}/items/{first['id']}")).json() == made
        assert (await client.get(f"{ALL}/{made['id']}/items/{first['id']}")).status_code == 404
        changed = (await client.post(f"{ALL}/{made['id']}", json={"metadata": {}})).json()
        assert changed == {**made, "metadata": {}} == (await client.get(f"{ALL}/{made['id']}")).json()
        assert (await client.delete(f"{ALL}/{made['id']}")).json()["deleted"]
        gone = await client.post(RESPONSES, json={"input": "a", "conversation": made["id"]})
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "conversation"
        return [*listed["data"], *rest["data"]]

    found = with_client(engine, work)
    assert engine.asked[1].tokens == engine.asked[2].tokens  # the whole conversation as input
    said = [(one["role"], one["content"][0]["text"], one["status"]) for one in found]
    assert said == [("user", "Hello", "completed"), ("user", "Count", "completed"), ("assistant", "One", "completed"),
                    ("user", "More", "completed"), ("assistant", "One", "completed")]  # fmt: skip


def test_the_store_is_bounded() -> None:
    store = ConversationStore(most_bytes=22_000)
    items = kept_items([{"role": "user", "content": "x" * 1000}])
    names = [store.create("", {}, 0, items, items_bytes(items)).id for _ in range(4)]
    assert [store.found("", name) is not None for name in names] == [False, True, True, True]
    with pytest.raises(ApiError, match="there is no conversation"):
        store.get("another", names[3])
    store.append("", names[3], items, items_bytes(items))
    assert store.found("", names[1]) is None and len(store.get("", names[3]).items) == 2
    kept = store.get("", names[3])
    assert store.without("", names[3], kept.items[0]["id"]).nbytes == kept.nbytes - items_bytes(items)
    with pytest.raises(ApiError, match="22000; begin another one"):
        store.append("", names[3], items * 4, 4 * items_bytes(items))
    with pytest.raises(ApiError, match="more than 4096 items"):
        store.check_room("", names[3], 4096, 0)
    store.describe("", names[3], {"a": "b" * 50}, 900)
    assert store.get("", names[3]).nbytes == kept.nbytes - items_bytes(items) + 900
    store.describe("", names[3], {}, 0)
    assert store.get("", names[3]).nbytes == kept.nbytes - items_bytes(items)


def test_what_is_refused() -> None:
    wrong = [
        (RESPONSES, {"input": "a", "conversation": 5}, "conversation"),
        (RESPONSES, {"input": "a", "conversation": {}}, "conversation"),
        (RESPONSES, {"input": "a", "conversation": "x", "previous_response_id": "y"}, "previous_response_id"),
        (ALL, {"items": [{"type": "item_reference", "id": "x"}]}, "items[0]"),
        (ALL, {"items": "a"}, "items"),
        (f"{ALL}/x", {}, "metadata"),
        (ALL, b'{"metadata": {"a": 1e999}}', "finite"),
        (ALL, b'{"items": [{"role": "user", "content": "a", "b": [1e999]}]}', "finite"),
        (RESPONSES, b'{"input": [{"role": "user", "content": "a", "b": 1e999}]}', "finite"),
    ]
    found = answers(FakeEngine(), *((path, body) for path, body, _ in wrong))
    for (_, body, word), one in zip(wrong, found):
        assert one.status_code == 400 and word in one.json()["error"]["message"], body
    assert answers(FakeEngine(), (f"{ALL}/x", None))[0].status_code == 404


def test_a_long_conversation_becomes_a_summary() -> None:
    """Of all of it, by the model, and the next request has it before the user's message."""
    engine = FakeEngine("Notes.")
    call = {"type": "function_call", "name": "ls", "arguments": "{}", "call_id": "c"}
    output = {"type": "function_call_output", "call_id": "c", "output": "a.py"}
    given = [
        HELLO,
        call,
        output,
        {"role": "assistant", "content": "There is a.py."},
        {"role": "user", "content": "Good"},
    ]

    async def work(client: httpx2.AsyncClient) -> dict[str, Any]:
        made: dict[str, Any] = (
            await client.post(f"{RESPONSES}/compact", json={"input": given, "instructions": "Help.", "model": "demo"})
        ).json()
        more = {"role": "user", "content": [{"type": "input_text", "text": "And now?"}]}
        assert (await client.post(RESPONSES, json={"input": [*made["output"], more]})).status_code == 200
        return made

    made = with_client(engine, work)
    assert made["object"] == "response.compaction" and made["usage"]["output_tokens"] > 1
    assert [one["type"] for one in made["output"]] == ["message", "message", "compaction"]
    assert base64.b64decode(made["output"][-1]["encrypted_content"].partition(":")[2]) == b"Notes."
    read, after = (engine.tokenizer.decode(one.tokens) for one in engine.asked)
    for part in ("system: Help.", "user: Hello", "calls ls with {}", "tool: a.py", "assistant: There is a.py."):
        assert part in read
    places = [after.index(part) for part in ("Hello", "Good", "Notes.", "And now?")]
    assert places == sorted(places) and after.count("user") == 1


def test_a_summary_reads_as_much_as_the_context_holds() -> None:
    tokenizer = FakeEngine().tokenizer
    messages = [{"role": "user", "content": f"line {index} " * 50} for index in range(40)]
    text = asked(tokenizer, messages, 300)[1]["content"]
    assert "line 39" in text and "line 5 " not in text and 250 < len(tokenizer.encode(text)) < 400
    pictures = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "a"}]}]
    assert "user: [picture]\na" in asked(tokenizer, pictures, 300)[1]["content"]


def test_where_a_summary_stands() -> None:
    summary = {"type": "compaction", "encrypted_content": sealed("Notes.")}
    alone = messages_of([summary])
    before = messages_of([summary, {"role": "assistant", "content": "Yes"}])
    twice = messages_of([summary, {"type": "compaction", "encrypted_content": sealed("More.")}, HELLO])
    assert [one["role"] for one in alone] == ["user"] and "Notes." in alone[0]["content"]
    assert [one["role"] for one in before] == ["user", "assistant"] and len(twice) == 1
    places = [twice[0]["content"].index(part) for part in ("Notes.", "More.", "Hello")]
    assert places == sorted(places)
    with pytest.raises(ApiError, match="at most 32 compactions"):
        messages_of([summary] * 33)
    for content in ("gAAAA", None, "mlcpipe:!"):
        with pytest.raises(ApiError, match=r"input\[0\].encrypted_content"):
            messages_of([{"type": "compaction", "encrypted_content": content}])
