"""Stored responses, in memory and in a file: how many stay, whose they are, and what a conversation of them has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import Rules
from mlcpipe.server.json_values import values_of
from mlcpipe.server.response_file import ResponseFile
from mlcpipe.server.response_store import ResponseStore
from tests.unit.server.fake_engine import FakeEngine, answers


def response(name: str, previous: str | None = None) -> dict[str, Any]:
    return {"id": name, "previous_response_id": previous, "output": [{"id": f"out-{name}"}]}


def ids(store: ResponseStore, *names: str, owner: str = "") -> list[bool]:
    return [store.has(owner, name) for name in names]


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., ResponseStore]]:
    """Makes a store with bounds."""
    made: list[ResponseStore] = []

    def one(**bounds: int) -> ResponseStore:
        path = tmp_path / f"{len(made)}.sqlite"
        made.append(ResponseStore(**bounds) if request.param == "memory" else ResponseFile(path, **bounds))
        return made[-1]

    yield one
    for store in made:
        store.close()


def test_those_used_last_stay(make: Callable[..., ResponseStore]) -> None:
    store = make(most=2)
    for name in ("a", "b"):
        store.add("", response(name), [], 1)
    store.get("", "a")
    store.add("", response("c"), [], 1)
    assert ids(store, "a", "b", "c") == [True, False, True]


def test_bytes_are_bounded_too(make: Callable[..., ResponseStore]) -> None:
    store = make(most_bytes=2000)
    for name in "abc":  # 912 bytes each
        store.add("", response(name), [], 100)
    assert ids(store, *"abc") == [False, True, True]
    store.add("", response("d"), [], 373)
    assert ids(store, *"abcd") == [False, True, True, False]
    store.delete("", "b")
    store.add("", response("e"), [], 140)
    assert ids(store, *"bce") == [False, True, True]


def test_a_response_that_is_too_large_says_that_it_is_not_stored(make: Callable[..., ResponseStore]) -> None:
    asked = ("/v1/responses", {"input": "a"})
    said = [answers(FakeEngine(), asked, store=make(**bounds))[0].json() for bounds in ({}, {"most_bytes": 1})]
    assert [one["store"] for one in said] == [True, False]


def test_small_values_take_memory_too() -> None:
    store = ResponseStore(most_bytes=100_000)
    store.add("", response("items"), [{}] * 200, 600)
    store.add("", response("values"), [], 3000, values=1000)
    store.add("", response("text"), [{}], 3000, values=5)
    assert ids(store, "items", "values", "text") == [False, False, True]
    assert values_of([[], [[]], {"a": 1, "b": {}}]) == 1 + 1 + 2 + 5


@pytest.mark.parametrize("bounds", [{"most": 4}, {"most_bytes": 4 * 916}])
def test_no_owner_can_flush_another_s(bounds: dict[str, int], make: Callable[..., ResponseStore]) -> None:
    store = make(**bounds)
    store.add("one", response("a"), [], 100)
    for index in range(10):
        store.add("other", response(f"b{index}"), [], 100)
    assert ids(store, "a", owner="one") == [True]
    assert ids(store, *(f"b{index}" for index in range(10)), owner="other") == [False] * 7 + [True] * 3


def test_a_history_is_all_that_came_before_and_stays_together(make: Callable[..., ResponseStore]) -> None:
    store = make(most=3)
    store.add("", response("a"), [{"id": "in-a"}], 5)
    store.add("", response("other"), [], 5)
    store.add("", response("b", "a"), [{"id": "in-b"}], 7)
    items, nbytes = store.history("", "b", 10)
    assert [one["id"] for one in items] == ["in-a", "out-a", "in-b", "out-b"] and nbytes == 12
    store.add("", response("c"), [], 5)
    assert ids(store, "a", "other", "b", "c") == [True, False, True, True]
    with pytest.raises(ApiError, match="more than 3 items"):
        store.history("", "b", 3)
    store.delete("", "a")
    with pytest.raises(ApiError, match="there is no response 'a'"):
        store.history("", "b", 10)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_a_key_sees_its_own_responses_alone(shares_prompts: bool) -> None:
    rules, made = Rules(keys=["k", "l"], shares_prompts=shares_prompts), []

    def ask(key: str, path: str, body: Any) -> Any:
        return answers(engine, (path, body), headers={"authorization": f"Bearer {key}"}, rules=rules, store=store)[0]

    engine, store = FakeEngine(), ResponseStore()
    made.append(ask("k", "/v1/responses", {"input": "a"}).json()["id"])
    path = f"/v1/responses/{made[0]}"
    assert (ask("k", path, None).status_code, ask("l", path, None).status_code) == (200, 404)
    assert ask("l", "/v1/responses", {"input": "a", "previous_response_id": made[0]}).status_code == 404
    assert answers(engine, (path, None), rules=rules, store=store)[0].status_code == 401


def test_pages_of_items() -> None:
    same = {"role": "user", "content": "Hello", "id": "same"}
    store = ResponseStore()
    made = answers(FakeEngine(), ("/v1/responses", {"input": [same, same, {**same, "id": "last"}]}), store=store)
    path = f"/v1/responses/{made[0].json()['id']}/input_items"
    page, *wrong = answers(
        FakeEngine(),
        *((path + query, None) for query in ("?order=asc&after=same", "?limit=0", "?order=x")),
        store=store,
    )
    assert [one["id"] for one in page.json()["data"]] == ["last"]
    assert [(one.status_code, one.json()["error"]["param"]) for one in wrong] == [(400, "limit"), (400, "order")]


def test_references_are_the_items_of_stored_responses(make: Callable[..., ResponseStore]) -> None:
    """Of the same owner, as long as they are kept; the response to them keeps the items themselves."""
    store, path = make(), "/v1/responses"
    (first,) = answers(FakeEngine("One"), (path, {"input": "Count"}), store=store)
    (question,) = store.get("", first.json()["id"]).items
    said = first.json()["output"][0]
    more = {"role": "user", "content": "More"}
    engine = FakeEngine("Two")
    referring = {"input": [{"type": "item_reference", "id": question["id"]}, {"id": said["id"]}, more]}
    plain = {"input": [question, said, more]}
    second, same, counted, unknown = answers(
        engine, (path, referring), (path, plain), (f"{path}/input_tokens", referring),
        (path, {"input": [more, {"type": "item_reference", "id": "x"}]}), store=store,
    )  # fmt: skip
    assert second.status_code == same.status_code == 200
    assert engine.asked[0].tokens == engine.asked[1].tokens and len(engine.asked[0].tokens) > 10
    assert counted.json()["input_tokens"] == len(engine.asked[0].tokens)
    assert store.get("", second.json()["id"]).items[:2] == [question, said]
    assert unknown.status_code == 404 and "input[1]: there is no item 'x'" in unknown.json()["error"]["message"]
    with pytest.raises(ApiError, match="no item"):
        store.resolved("another", referring["input"], 1 << 20)
    with pytest.raises(ApiError, match="too large together"):
        store.resolved("", referring["input"], 10)
    with pytest.raises(ApiError, match=r"input\[1\]: the item .* is there already"):
        store.resolved("", [{"id": said["id"]}, {"id": said["id"]}], 1 << 20)
    for one in (first, second, same):
        store.delete("", one.json()["id"])
    with pytest.raises(ApiError, match="no item"):
        store.resolved("", referring["input"], 1 << 20)
    assert store._place_of("", said["id"]) is None


def test_items_that_are_referred_to_take_memory_of_each_response() -> None:
    """Their own response may be deleted; of one response they count once, however many they are."""
    store, path = ResponseStore(), "/v1/responses"
    given = [{"type": "other", "id": "large", "data": "x" * 50_000}, {"role": "user", "content": "Hello", "id": "said"}]
    (first,) = answers(FakeEngine(), (path, {"input": given}), store=store)
    before = store.get("", first.json()["id"])
    (second,) = answers(FakeEngine(), (path, {"input": [{"id": "large"}, {"id": "said"}]}), store=store)
    assert second.status_code == 200
    store.delete("", before.response["id"])
    assert store.get("", second.json()["id"]).items == before.items and store._nbytes[""] > 4 * 50_000
    store.add("", response("many"), [{"id": f"i{index}"} for index in range(100)], 5000)
    assert store.resolved("", [{"id": f"i{index}"} for index in range(100)], 5000)[1] == 5000
