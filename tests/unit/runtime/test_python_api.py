"""What a Python program expects of an engine: settings as arguments, batches, forms, async, threads, an end."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import weakref
from typing import Any, Literal

import pytest

import mlcpipe
from mlcpipe import Engine
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import ToolCall, add_pieces
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.drafting import Search
from mlcpipe.runtime.tools import choice_of
from tests.conftest import Bundles

QUESTIONS = ["What is mlcpipe?", "Hello", "What is TVM?", "What is mlcpipe?"]
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["score"],
    "additionalProperties": False,
}


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def engine(demo_bundles: Bundles) -> Engine:
    return Engine(demo_bundles["q4f16_1"], context_length=512)


@pytest.fixture(scope="module")
def alone(demo_bundles: Bundles) -> list[list[int]]:
    """The answers of engines that have nothing else to do."""
    return [
        Engine(demo_bundles["q4f16_1"]).chat(asked(text), temperature=0, max_tokens=24).token_ids for text in QUESTIONS
    ]


def test_answers_of_a_batch_are_those_alone(engine: Engine, alone: list[list[int]]) -> None:
    batch = engine.chat_batch([asked(text) for text in QUESTIONS], temperature=0, max_tokens=24)
    assert [one.token_ids for one in batch] == alone
    prompts: list[Any] = [engine.tokenizer.encode_chat(asked(text)) for text in QUESTIONS * 3]  # more than at once
    again = engine.generate_batch(prompts, temperature=0, max_tokens=24)
    assert [one.token_ids for one in again] == alone * 3


def test_answers_in_threads_and_coroutines_are_those_alone(engine: Engine, alone: list[list[int]]) -> None:
    found: dict[int, list[int]] = {}

    def answer(index: int) -> None:
        found[index] = engine.chat(asked(QUESTIONS[index]), temperature=0, max_tokens=24).token_ids

    async def read(text: str) -> list[int]:
        stream = engine.chat(asked(text), temperature=0, max_tokens=24, stream=True)
        return [token async for chunk in stream for token in chunk.token_ids]

    async def together() -> list[list[int]]:
        return await asyncio.gather(*map(read, QUESTIONS))

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    assert asyncio.run(together()) == alone
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(QUESTIONS))] == alone


@pytest.mark.parametrize("smaller", [False, True], ids=["lookup", "model"])
def test_drafts_change_no_answer(
    demo_bundles: Bundles, alone: list[list[int]], smaller: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are always checked, whether that is faster or not."""
    monkeypatch.setattr(CostModel, "may_draft", lambda self, load, rows: True)
    monkeypatch.setattr(CostModel, "draft_rows", lambda self, load, gains: len(gains))
    monkeypatch.setattr(CostModel, "draft_length", lambda self, load, rates, token_s, most: min(3, most))
    monkeypatch.setattr(Search, "pays", lambda self: True)
    bundle = demo_bundles["q4f16_1"]
    with Engine(bundle, draft="lookup", draft_model=bundle if smaller else None) as engine:
        for _ in range(2):  # the second time the prompts are parked
            batch = engine.chat_batch([asked(text) for text in QUESTIONS], temperature=0, max_tokens=24)
            assert [one.token_ids for one in batch] == alone
        engine.generate([3, 4, 5, 6, 7] * 9, temperature=0, max_tokens=24, ignore_eos=True)
        totals = engine.model.core.scheduler.totals
        assert totals.drafted > 0 and totals.accepted > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": "medusa"}, "draft; expected lookup, or off without a draft model; found 'medusa'"),
        ({"draft": "off", "draft_model": "."}, "draft; expected lookup, or off without"),
        ({"draft": "off", "draft_head": "."}, "draft_head; expected no draft model, and drafts; found ."),
        ({"draft_head": "."}, "a bundle takes no draft head"),
        ({"mmproj": "mmproj.gguf"}, "a bundle takes no mmproj file"),
    ],
)
def test_drafts_that_contradict(demo_bundles: Bundles, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mlcpipe.load(
            demo_bundles["q4f16_1"],
            **{**arguments, "draft_model": arguments.get("draft_model") and demo_bundles["q4f16_1"]},
        )


def test_the_next_turn_computes_what_is_new_to_the_token(engine: Engine) -> None:
    """Beside another conversation, and after a stream that was closed."""
    first, other = asked(QUESTIONS[0]), asked(QUESTIONS[1])
    answer = engine.chat(first, temperature=0, max_tokens=9)
    with engine.chat(other, temperature=0, stream=True) as stream:
        said = "".join(next(stream).text for _ in range(5))
    for messages, text, new in ((first, answer.text, 9), (other, said, 5)):
        turn = [*messages, {"role": "assistant", "content": text}, *asked("Why?")]
        begin = len(engine.tokenizer.encode_chat(messages))
        assert engine.chat(turn, max_tokens=1).stats.cached_tokens >= begin + new - 1


def test_a_form(engine: Engine) -> None:
    pydantic = pytest.importorskip("pydantic", reason="a class of pydantic's")
    pytest.importorskip("llguidance", reason="it computes the masks")
    options = pydantic.ConfigDict(extra="forbid")
    model = pydantic.create_model("Score", __config__=options, score=(int, pydantic.Field(ge=0, le=99)))
    for form in (SCHEMA, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, model):
        done = engine.chat(asked("Score"), response_format=form, temperature=0, max_tokens=40)
        assert 0 <= json.loads(done.text)["score"] < 100
    with pytest.raises(UsageError, match='response_format; expected {"type": "json_object"}.*; found 7'):
        engine.chat(asked("Score"), response_format=7)  # type: ignore[call-overload]


def open_page(name: Literal["models", "targets"], whole: bool = False) -> str:
    """Open a page of the documentation.

    Args:
        name: of the page
    """
    return f"{name}:{whole}"


def not_described(file: io.BytesIO) -> None: ...


def test_a_tool_is_called_and_its_result_is_read(engine: Engine) -> None:
    """As a function and as JSON, whole and streamed; the conversation continues with the call and its result."""
    given = dict[str, Any](tool_choice="required", temperature=0, max_tokens=80, parallel_tool_calls=False)
    answer = engine.chat(asked("models"), tools=[open_page], **given)
    (call,) = answer.tool_calls
    assert (answer.text, answer.finish_reason, call.name) == ("", "tool_calls", "open_page")
    assert open_page(**json.loads(call.arguments)).startswith(("models:", "targets:"))
    described = choice_of([open_page], None).tools[0].described()
    assert described["function"]["description"] == "Open a page of the documentation."
    assert described["function"]["parameters"]["required"] == ["name"]
    assert described["function"]["parameters"]["properties"]["name"]["description"] == "of the page"
    chunks = list(engine.chat(asked("models"), tools=[described], stream=True, **given))
    calls: list[ToolCall] = []
    add_pieces(calls, (piece for chunk in chunks for piece in chunk.tool_calls))
    assert [one[1:] for one in calls] == [call[1:]] and chunks[-1].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "Qwen3"}
    after = [*asked("models"), answer.message, result]
    assert answer.message["tool_calls"][0]["function"] == {"name": "open_page", "arguments": call.arguments}
    (last,) = engine.chat_batch([after], tools=[open_page], tool_choice="none", temperature=0, max_tokens=9)
    assert last.text and not last.tool_calls
    prompt = engine.tokenizer.decode(engine.model.tokens)
    assert "<tool_response>\nQwen3" in prompt and '{"name": "open_page", "arguments": {"' in prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling": {"temperature": 0}}, "sampling; expected SamplingParams; found dict"),
        ({"temperature": -1}, r"temperature; expected a number in \[0, 100\]; found -1"),
        (
            {"messages": [{"role": "banana", "content": "x"}]},
            r"messages\[0\].role; expected system, .*; found 'banana'",
        ),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content; expected text; found none"),
        ({"messages": []}, "messages; expected at least one"),
        ({"thinking": True}, "this model's chat template cannot switch thinking"),
        ({"max_tokens": 0}, "max_tokens; expected an integer from 1"),
        ({"tools": [7]}, r'tools\[0\]; expected {"type": "function", .*; found 7'),
        ({"tools": [not_described]}, r"tools\[0\]; expected a function whose type hints have a JSON schema; .*; give"),
        ({"tools": [open_page], "tool_choice": "open"}, "tool_choice; expected none, auto, .*; found 'open'"),
        ({"tool_choice": "required"}, "tool_choice; expected tools"),
        (
            {"messages": [*asked("x"), {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
            r"messages\[1\].tool_calls; expected calls of functions with a name; found {'name': 'f'}",
        ),
    ],
)
def test_wrong_arguments(engine: Engine, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine.chat(**{"messages": asked("Hello"), **arguments})


def test_other_wrong_calls(engine: Engine) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'temprature'; settings are temperature, top_p"):
        engine.chat(asked("Hello"), temprature=0)
    with pytest.raises(UsageError, match="token ids; .*; found texts; use generate_batch for several prompts"):
        engine.generate(["a", "b"])  # type: ignore[call-overload]


def test_a_closed_engine_gives_its_memory_back(demo_bundles: Bundles) -> None:
    with mlcpipe.Engine(demo_bundles["q4f16_1"]) as engine:
        assert repr(engine).endswith("llama q4f16_1, 2048 tokens, CPU)")
        stream = engine.chat(asked("Hello"), stream=True)
        next(stream)
        core = weakref.ref(engine.model.core)
    with pytest.raises(UsageError, match="the engine was closed"):
        next(stream)
    with pytest.raises(UsageError, match="the engine is closed in .*; open another one"):
        engine.chat(asked("Hello"))
    engine.close()
    del stream
    gc.collect()
    assert core() is None and repr(engine).endswith("closed)")
