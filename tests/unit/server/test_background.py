"""Responses in the background: got until they end, followed as a stream, cancelled, and how many there may be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi")

from mlcpipe.server import background
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import Rules
from mlcpipe.server.response_store import ResponseStore
from tests.unit.server.fake_engine import FakeEngine, answers, with_client

PATH = "/v1/responses"
ASK = {"input": "a", "background": True}


async def ended(client: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = (await client.get(f"{PATH}/{name}")).json()
        if found["status"] not in ("queued", "in_progress"):
            return found
        await asyncio.sleep(0)


def test_one_is_got_until_it_has_ended_and_then_continued() -> None:
    engine = FakeEngine("One")

    async def work(client: httpx2.AsyncClient) -> None:
        begun = (await client.post(PATH, json=ASK)).json()
        assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
        whole = await ended(client, begun["id"])
        assert whole["status"] == "completed" and whole["output"][0]["content"][0]["text"] == "One"
        assert whole["usage"]["output_tokens"] > 1
        assert (await client.post(f"{PATH}/{begun['id']}/cancel")).json() == whole
        after = await client.post(PATH, json={"input": "b", "previous_response_id": begun["id"]})
        assert after.status_code == 200

    with_client(engine, work)
    assert engine.asked[1].tokens[: len(engine.asked[0].tokens)] == engine.asked[0].tokens


def test_its_events_are_followed_again_from_any_of_them() -> None:
    async def work(client: httpx2.AsyncClient) -> tuple[str, str, str]:
        first = await client.post(PATH, json={**ASK, "stream": True})
        name = json.loads(first.text.split("data: ")[1].split("\n")[0])["response"]["id"]
        again = await client.get(f"{PATH}/{name}?stream=true")
        rest = await client.get(f"{PATH}/{name}?stream=true&starting_after=2")
        return first.text, again.text, rest.text

    first, again, rest = with_client(FakeEngine("One two three"), work)
    assert first == again and first.endswith(rest) and '"sequence_number":3,' in rest.split("\n\n")[0]
    assert '"type":"response.completed"' in rest.split("\n\n")[-2]


def test_events_that_are_too_long_leave_and_are_missed_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_EVENT_CHARS", 30)

    async def events() -> AsyncIterator[str]:
        for index in range(8):
            yield f"event {index}  "

    async def work() -> tuple[list[str], list[str]]:
        run = background.Run("", {"id": "resp_1"}, streams=True)
        source: Any = SimpleNamespace(close=lambda: None)

        async def failed(error: ApiError, status: str) -> str:
            raise error

        run.start(source, events(), failed, AsyncExitStack())
        followed = [text async for text in run.follow(4)]
        with pytest.raises(ApiError, match="starting_after: the events before 5 are gone"):
            [text async for text in run.follow(3)]
        return followed, [text async for text in run.follow(100)]

    assert asyncio.run(work()) == (["event 5  ", "event 6  ", "event 7  "], [])


def test_one_is_cancelled_and_one_is_deleted_while_it_runs() -> None:
    engine = FakeEngine("One", ends=False)

    async def work(client: httpx2.AsyncClient) -> None:
        one, other = [(await client.post(PATH, json=ASK)).json()["id"] for _ in range(2)]
        early = await client.post(PATH, json={"input": "b", "previous_response_id": one})
        assert early.status_code == 400 and "has not ended" in early.text
        stopped = (await client.post(f"{PATH}/{one}/cancel")).json()
        assert (stopped["status"], stopped["error"]) == ("cancelled", None)
        assert (await client.get(f"{PATH}/{one}")).json() == stopped
        assert (await client.delete(f"{PATH}/{other}")).json()["deleted"]
        assert (await client.get(f"{PATH}/{other}")).status_code == 404

    with_client(engine, work)
    assert len(engine.cancelled) == 2


def test_one_that_fails_says_why() -> None:
    async def work(client: httpx2.AsyncClient) -> dict[str, Any]:
        return await ended(client, (await client.post(PATH, json=ASK)).json()["id"])

    failed = with_client(FakeEngine(fails=True), work)
    assert failed["status"] == "failed" and "NaN" in failed["error"]["message"]


def test_how_many_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, key = Rules(keys=["k"], per_key=2), {"authorization": "Bearer k"}
    found = answers(FakeEngine(ends=False), *[(PATH, ASK)] * 3, headers=key, rules=rules)
    assert [one.status_code for one in found] == [200, 200, 429]
    monkeypatch.setattr(background, "MAX_RUNS", 1)
    found = answers(FakeEngine(ends=False), *[(PATH, ASK)] * 2)
    assert [one.status_code for one in found] == [200, 503] and found[1].headers["retry-after"] == "5"


def test_how_much_their_requests_hold_and_how_long_they_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those that began while others were prepared."""
    monkeypatch.setattr(background, "MAX_INPUT_BYTES", 100)
    long = {**ASK, "metadata": {"a": "b" * 100}}

    async def work(client: httpx2.AsyncClient) -> list[int]:
        found = await asyncio.gather(*(client.post(PATH, json=one) for one in (long, long)))
        return sorted(one.status_code for one in found)

    assert with_client(FakeEngine(ends=False), work) == [200, 503]
    endless = {**ASK, "max_output_tokens": 2049}
    for dropped, status in ((0, 400), (None, 200)):
        assert answers(FakeEngine(dropped=dropped), (PATH, endless))[0].status_code == status


def test_one_that_the_store_does_not_take_is_got_and_deleted() -> None:
    async def work(client: httpx2.AsyncClient) -> list[int]:
        name = (await client.post(PATH, json=ASK)).json()["id"]
        assert (await ended(client, name))["status"] == "completed"
        asked = [await client.delete(f"{PATH}/{name}"), await client.get(f"{PATH}/{name}")]
        return [one.status_code for one in asked]

    assert with_client(FakeEngine(), work, store=ResponseStore(most_bytes=1)) == [200, 404]


def test_what_is_refused() -> None:
    stored, unstored, plain = answers(
        FakeEngine(), (PATH, {"input": "a"}), (PATH, {**ASK, "store": False}), (f"{PATH}/x/cancel", {})
    )
    assert unstored.status_code == 400 and "background" in unstored.text and plain.status_code == 404

    async def work(client: httpx2.AsyncClient) -> list[int]:
        name = (await client.post(PATH, json={"input": "a"})).json()["id"]
        asked = [await client.post(f"{PATH}/{name}/cancel"), await client.get(f"{PATH}/{name}?stream=true")]
        return [one.status_code for one in asked]

    assert stored.status_code == 200 and with_client(FakeEngine(), work) == [400, 400]
