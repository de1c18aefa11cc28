"""Bodies that would take much memory or time are refused, in few words and before they are built."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest

pytest.importorskip("fastapi")

from pydantic import ValidationError

from mlcpipe.runtime.serving.interface import EngineStats
from mlcpipe.server import app
from mlcpipe.server.bodies import MAX_IDS, MAX_ITEMS, Body
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import check_values
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.off_loop import LONG_BYTES, OffLoop
from tests.unit.server.fake_engine import FakeEngine, answers

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
assert app.APIS  # all bodies are known


def models(base: type[Body] = Body) -> Iterator[type[Body]]:
    for one in base.__subclasses__():
        yield one
        yield from models(one)


def has_many(annotation: Any) -> bool:
    return get_origin(annotation) in (list, dict) or any(map(has_many, get_args(annotation)))


FIELDS = [
    (model, field.alias or name)
    for model in models()
    for name, field in model.model_fields.items()
    if has_many(field.annotation)
]


def errors_at(model: type[Body], field: str, value: Any) -> int:
    """How many errors pydantic finds in one field."""
    try:
        model.model_validate_json(json.dumps({field: value}))
    except ValidationError as error:
        return sum(one["loc"][:1] == (field,) for one in error.errors())
    except ApiError as error:  # of a field that another becomes
        return int(error.param == field)
    return 0


@pytest.mark.parametrize(("model", "field"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_the_first_wrong_item_ends_the_check(model: type[Body], field: str) -> None:
    """Wherever a list or a mapping may be: pydantic would make an error for each item."""
    lists: list[Any] = [["\0"] * 500, [["\0", {}] * 250], [[{}] * 250], [{}, 1] * 250, [None] * 500]
    found = [errors_at(model, field, value) for value in (*lists, {f"a{i}": [] for i in range(500)})]
    assert any(found) and max(found) < 10


def test_there_are_such_fields() -> None:
    assert len(FIELDS) > 40 and {model.__name__ for model, _ in FIELDS} >= {"ChatBody", "RerankBody", "Prediction"}


@pytest.mark.parametrize(("field", "item"), [("messages", {}), ("tools", {}), ("stop", "a"), ("modalities", "text")])
def test_lists_are_short(field: str, item: object) -> None:
    (long,) = answers(FakeEngine(), (CHAT, {"messages": HELLO, field: [item] * (MAX_ITEMS + 1)}))
    assert long.status_code == 400 and f"at most {MAX_ITEMS} items" in long.text


MANY = 1000


@pytest.mark.parametrize(
    ("data", "fits"),
    [
        ("[" + "1," * (MANY - 2) + "1]", True),
        ("[" + "1," * MANY + "1]", False),
        ("{}," * MANY, False),
        (json.dumps({"a": "[{:," * MANY}), True),
        (json.dumps({"a": '"[,\\' * MANY}), True),
        (json.dumps({"\\": "\\", "b": '\\"' + "," * MANY}), True),
        ('["\\\\",' + "1," * MANY, False),
        ('["\\\\\\"' + "," * MANY + '"]', True),
        (json.dumps(["a"] * (MANY - 1)), True),
        (json.dumps(["a"] * (MANY + 1)), False),
        ('""' * 9 * MANY + "," * MANY * 2, False),
    ],
    ids=range(11),
)
def test_values_are_counted_outside_of_texts(data: str, fits: bool) -> None:
    if fits:
        check_values(data.encode(), MANY)
    else:
        with pytest.raises(ApiError, match="too many values"):
            check_values(data.encode(), MANY)


def calling(arguments: str) -> dict[str, Any]:
    """A message with a call."""
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, b'{"messages": [' + b"{}," * Body.most_values + b"{}]}", "too many values"),
        (CHAT, b'{"messages": [], "a": [' + b"1," * Body.most_values + b"1]}", "too many values"),
        ("/v1/completions", b'{"prompt": [' + b"1," * (MAX_IDS + 1) + b"1]}", "too many values"),
        ("/detokenize", b'{"tokens": [' + b"1," * 300_000 + b"99999999]}", "expected ids"),
        (CHAT, {"messages": HELLO, **{f"a{i}": 1 for i in range(257)}}, "257 unknown fields"),
        (CHAT, {"messages": HELLO, "logit_bias": {str(i): 1 for i in range(16385)}}, "at most 16384 tokens"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}]}, "at most 4096"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 4097}]}, "at most 4096"),
        ("/v1/responses", {"input": "a", "metadata": {"a": "b" * (4 << 20)}}, "each answer repeats"),
        (CHAT, {"messages": [*HELLO, calling('{"a": [' + "1," * 300_000 + "1]}")]}, "too many values"),
        (CHAT, {"messages": [*HELLO, calling('{"a": ' * 2), calling("[" * (2 << 20))]}, "the text is too long"),
        (CHAT, {"messages": HELLO, "json_schema": '{"enum": [' + "1," * 300_000 + "1]}"}, "too many values"),
    ],
    ids=range(12),
)
def test_what_would_take_long_is_refused(path: str, body: Any, words: str) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, (path, body))
    assert (answer.status_code, engine.asked) == (400, [])
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "full", "status"),
    [
        ({}, True, 503),
        ({"temperature": 1000}, False, 400),
        ({"priority": 9999}, False, 400),
        ({"typical_p": 2}, False, 400),
        ({"model": "other"}, False, 404),
        ({"tools": [{"function": {"name": "f", "description": "<" * (3 << 20)}}]}, False, 400),
        ({"chat_template_kwargs": {"a": {"b" * (3 << 20): 1}}}, False, 400),
    ],
    ids=["queue", "sampling", "priority", "stop", "model", "tools", "variables"],
)
def test_what_is_refused_anyway_is_not_rendered(
    fields: dict[str, Any], full: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(full=full)
    monkeypatch.setattr(engine.tokenizer, "encode_chat", lambda *_, **__: pytest.fail("it was rendered"))
    (answer,) = answers(engine, (CHAT, {"messages": HELLO, **fields}))
    assert answer.status_code == status


def test_few_unknown_fields_of_a_body_are_counted() -> None:
    metrics = Metrics(EngineStats)
    metrics.count_unknown("/", (f"a{i}" for i in range(100)))
    assert metrics.text().decode().count("mlcpipe_unknown_fields_total{") == 20


def test_long_work_holds_up_no_short_work() -> None:
    go, off_loop = threading.Event(), OffLoop()

    async def work() -> str:
        long = [asyncio.ensure_future(off_loop.apart(go.wait, LONG_BYTES + 1)) for _ in range(8)]
        short = await asyncio.wait_for(off_loop.apart(lambda: threading.current_thread().name), 20)
        assert not any(one.done() for one in long)
        go.set()
        assert await asyncio.gather(*long) == [True] * 8
        return short

    short = asyncio.run(work())
    off_loop.close()
    assert short != threading.current_thread().name
