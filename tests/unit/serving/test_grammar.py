"""Masks of grammars: for logits of more and of fewer rows than there are tokens, and within limits of time."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance")

from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving import grammar as grammars
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource, Matcher
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.conftest import Bundles, write_byte_tokenizer

END = 256  # of 257 tokens
AB = GrammarSource("regex", "[ab]{1,2}")
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return Tokenizer.load(folder, generation_config={}, config={})


def allowed(matcher: Matcher, rows: int) -> set[int]:
    words = np.full(-(-rows // 32), -1, np.int32)
    matcher.fill(words)
    return {index for index in range(rows) if words[index // 32] >> (index % 32) & 1}


@pytest.mark.parametrize(
    "source", [AB, GrammarSource("lark", "start: /[ab]{1,2}/"), GrammarSource("gbnf", "root ::= [ab] [ab]?")]
)
@pytest.mark.parametrize(
    ("rows", "ends"),
    [
        (257, {END}),
        (260, {END}),
        (304, {END}),
        (304, {END, 300}),
        (304, set()),
        (256, {END}),
        (256, set()),
        (128, {END}),
    ],
)
def test_masks_have_the_rows_of_the_logits(
    source: GrammarSource, rows: int, ends: set[int], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without a token are never allowed but where they end an answer."""
    monkeypatch.setattr(tokenizer, "eos_token_ids", frozenset(ends))
    matcher = GrammarCompiler(tokenizer, rows).compile(source).matcher()
    letters = {tokenizer.encode(char)[0] for char in "ab"}
    first, second = tokenizer.encode("ab")
    assert allowed(matcher, rows) == letters
    assert rows - 1 in ends or matcher.allowed([first, rows - 1]) == 1
    matcher.accept(first)
    assert allowed(matcher, rows) == letters | {end for end in ends if end < rows}
    matcher.accept(second)
    assert matcher.ended


@pytest.mark.parametrize("rows", [304, 256])  # with and without a row of <end>
def test_a_text_may_read_like_a_control_token(rows: int, tokenizer: Tokenizer) -> None:
    matcher = GrammarCompiler(tokenizer, rows).compile(GrammarSource("regex", "a<end>b")).matcher()
    for char in "a<end>b":
        (token,) = tokenizer.encode(char)
        assert allowed(matcher, rows) == {token}
        matcher.accept(token)
    assert matcher.ended


@pytest.fixture(scope="module")
def engine(tiny_bundles: Bundles) -> Iterator[Batching]:
    engine = Batching(load_bundle(Path(tiny_bundles["q0f32"]), None, 2), kv_tokens=1024)
    yield engine
    engine.close()


def test_a_model_of_more_rows_than_tokens(engine: Batching, tokenizer: Tokenizer) -> None:
    """Its answers fit a schema, and no row without a token is drawn, with a grammar, a bias, or nothing."""
    compiler = GrammarCompiler(tokenizer, engine.vocab_size)
    source = GrammarSource("json_schema", json.dumps(SCHEMA))
    any_text = compiler.compile(GrammarSource("regex", "(.|\n)*"))
    hot = SamplingParams(temperature=100.0, top_p=1.0, seed=1, logit_bias=dict.fromkeys(range(257, 304), 100.0))
    asked = [
        Request(
            [5, 6, 7],
            100,
            SamplingParams(temperature=2.0, seed=seed),
            frozenset({END}),
            grammar=compiler.compile(source),
        )
        for seed in range(3)
    ] + [Request([5, 6, 7], 150, hot, grammar=one) for one in (None, any_text)]
    found = [[event.token for event in stream if event.token is not None] for stream in map(engine.submit, asked)]
    for tokens in found[:3]:
        assert set(json.loads(tokenizer.decode(tokens))) == {"yes"}
    assert all(max(tokens) < 257 and len(set(tokens)) > 50 for tokens in found[3:])


@pytest.mark.parametrize("optional", [500, 501])
def test_objects_have_no_more_optional_properties_than_can_be_followed(optional: int, tokenizer: Tokenizer) -> None:
    properties = {f"a{i}": {"type": "integer"} for i in range(optional + 1)}
    schema = {"items": {"type": "object", "properties": properties, "required": ["a7"]}}
    source = GrammarSource("json_schema", json.dumps({"type": "array", **schema}))
    if optional == 500:
        matcher = GrammarCompiler(tokenizer, 304).compile(source).matcher()
        for token in tokenizer.encode('[{"a3":1,"a7":2,"a400":3}]'):
            matcher.accept(token)
        assert matcher.ended
    else:
        with pytest.raises(UsageError, match="501 optional properties, expected at most 500"):
            GrammarCompiler(tokenizer, 304).compile(source)


def test_answers_to_one_request_share_its_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by half a second for each mask and each token."""
    compiler = GrammarCompiler(tokenizer, 304)
    source, letter = GrammarSource("regex", "a*"), tokenizer.encode("a")[0]
    ours, theirs = compiler.compile(source), compiler.compile(source)
    matchers = [ours.matcher(), ours.matcher()]
    clock = itertools.count(step=0.25)
    monkeypatch.setattr(grammars.time, "thread_time", lambda: next(clock))
    for matcher in matchers:
        matcher.accept(letter)  # 0.245 s beyond what is free
    for matcher in matchers:
        allowed(matcher, 304)
    for matcher in matchers:
        matcher.accept(letter)
    with pytest.raises(
        UsageError, match=r"the grammar takes too long; expected 5 ms of processor time per token, and 1 s more"
    ):
        allowed(matchers[0], 304)
    assert allowed(theirs.matcher(), 304)


class _Waits:
    """A grammar of anything, whose masks wait for `go` from the third one on."""

    def __init__(self, inner: grammars.Grammar, go: threading.Event) -> None:
        self._inner, self._go = inner, go
        self.waiting = threading.Event()

    def matcher(self) -> Any:
        matcher, count = self._inner.matcher(), itertools.count()
        fresh = matcher._fresh

        def slow() -> Any:
            if next(count) >= 2:
                self.waiting.set()
                assert self._go.wait(60)
            return fresh()

        matcher._fresh = slow  # type: ignore[method-assign]
        return matcher


@pytest.mark.parametrize("prediction", [(), (97, 98, 99) * 10])
def test_others_do_not_wait_for_a_slow_mask(
    engine: Batching, tokenizer: Tokenizer, prediction: tuple[int, ...]
) -> None:
    """They end before it is there; then its answer continues as it would have alone."""
    grammar = GrammarCompiler(tokenizer, engine.vocab_size).compile(GrammarSource("regex", "(.|\n){40,}"))
    go = threading.Event()

    def request(grammar: Any) -> Request:
        return Request([5, 6, 7], 20, SamplingParams(seed=3), grammar=grammar, prediction=prediction)

    expected = [event.token for event in engine.submit(request(grammar))]
    slow = _Waits(grammar, go)
    stream = engine.submit(request(slow))
    assert slow.waiting.wait(60)
    others = [[event.token for event in engine.submit(request(one))] for one in (grammar, None)]
    assert others[0] == expected and len(others[1]) == 20
    got = stream.take()
    assert 0 < len(got) < 20 and got[-1].finish_reason is None
    go.set()
    assert [event.token for event in (*got, *stream)] == expected


def test_who_has_not_begun_gets_the_place_of_who_waits_for_a_mask(tiny_bundles: Bundles, tokenizer: Tokenizer) -> None:
    engine = Batching(load_bundle(Path(tiny_bundles["q0f32"]), None, 2), kv_tokens=512, max_sequences=1)
    grammar = GrammarCompiler(tokenizer, engine.vocab_size).compile(GrammarSource("regex", "(.|\n){40,}"))
    go = threading.Event()
    slow = _Waits(grammar, go)
    expected = [event.token for event in engine.submit(Request([5, 6, 7], 20, SamplingParams(seed=3), grammar=grammar))]
    stream = engine.submit(Request([5, 6, 7], 20, SamplingParams(seed=3), grammar=slow))
    assert slow.waiting.wait(60)
    assert len(list(engine.submit(Request([8, 9], 10)))) == 10
    go.set()
    assert [event.token for event in stream] == expected and engine.stats().preemptions == 1
    engine.close()
