"""The batching engine on the demo model: answers as alone, cancels, deadlines, failures, an engine that continues."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe import Engine
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError, ResourceError, UsageError
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.random_numbers import Uniforms, philox
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource
from mlcpipe.runtime.serving.interface import OverloadedError, Request, Stream

if TYPE_CHECKING:
    from tests.conftest import Bundles

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.2, top_p=0.8, top_k=40, seed=4, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={300: 2.0}),
)


@pytest.fixture(scope="module")
def bundle(demo_bundles: Bundles) -> LoadedBundle:
    return load_bundle(demo_bundles["q4f16_1"], 512)


@pytest.fixture
def engine(bundle: LoadedBundle) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=2048, max_queue=40)
    yield made
    made.close()


def request(index: int, max_tokens: int = 24, **more: object) -> Request:
    """One of several, of different lengths; some begin alike."""
    tokens = [5 + (7 * i + (index if i > 40 else index % 3)) % 2000 for i in range(3 + 11 * index)]
    return Request(tokens, max_tokens, KINDS[index % len(KINDS)], logprobs=2 if index % 2 else None, **more)


def tokens_of(stream: Stream) -> list[tuple[int | None, float | None]]:
    return [(event.token, event.logprob) for event in stream]


def test_answers_and_probabilities_are_those_alone(engine: Batching) -> None:
    requests = [request(index) for index in range(12)]
    alone = [tokens_of(engine.submit(one)) for one in requests]
    together = [tokens_of(stream) for stream in [engine.submit(one) for one in requests * 3]]
    assert together == alone * 3
    assert all(len(answer) == 24 for answer in alone) and len({tuple(answer) for answer in alone}) > 8


@pytest.mark.parametrize("length", [1, 32, 45])
def test_answers_to_one_prompt_are_those_of_requests_alone(engine: Batching, length: int) -> None:
    """They start from the pages of the first, and the page where the prompt ends is copied."""
    prompt = [11 + 13 * i % 1500 for i in range(length)]
    requests = [
        Request(prompt, 30, replace(KINDS[index], seed=index), logprobs=1, namespace="n", deterministic=True)
        for index in (0, 1, 2, 3, 1)
    ]
    with engine.together:
        streams = [engine.submit(one) for one in requests]
    events = [list(stream) for stream in streams]
    assert [one[0].cached_tokens for one in events] == [0, *[length] * 4]
    together = [[(event.token, event.logprob) for event in one] for one in events]
    assert together == [tokens_of(engine.submit(replace(one, namespace=str(i)))) for i, one in enumerate(requests)]
    assert together[1] == together[4] != together[2]


def test_a_deterministic_turn_is_that_of_a_new_prompt(bundle: LoadedBundle, engine: Batching) -> None:
    """After an answer of three pages, which another turn reuses."""
    first = [token for token, _ in tokens_of(engine.submit(request(5, 60)))]
    turn = [*request(5).tokens, *(token for token in first if token is not None), 7]
    later = Request(turn, 20, KINDS[0], logprobs=1, deterministic=True)
    cached = [list(engine.submit(replace(later, deterministic=wanted)))[-1].cached_tokens for wanted in (True, False)]
    assert cached[0] <= len(request(5).tokens) < cached[1]
    new = Batching(bundle, kv_tokens=512)
    expected = tokens_of(new.submit(later))
    new.close()
    assert tokens_of(engine.submit(later)) == expected


def test_closing_finishes_what_runs_and_refuses_the_rest(bundle: LoadedBundle) -> None:
    engine = Batching(bundle, kv_tokens=2048)
    streams = [engine.submit(request(index)) for index in range(6)]
    began = time.monotonic()
    engine.close(drain_s=120)
    assert time.monotonic() - began < 100  # it ends when they do
    assert {list(stream)[-1].finish_reason for stream in streams} == {"length"}
    with pytest.raises(OverloadedError):
        engine.submit(request(0))
    engine = Batching(bundle, kv_tokens=2048)
    streams = [engine.submit(request(index, 400)) for index in range(6)]
    engine.close()
    assert {list(stream)[-1].finish_reason for stream in streams} == {"cancelled"}


def test_everybody_ends_and_gives_all_pages_back(engine: Batching) -> None:
    streams = [engine.submit(request(index % 12, 200)) for index in range(30)]
    next(iter(streams[0]))
    for stream in streams[::2]:
        engine.cancel(stream.id)
    reasons = [[event.finish_reason for event in stream][-1] for stream in streams]
    assert set(reasons[::2]) == {"cancelled"} and set(reasons[1::2]) == {"length"}
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)


def test_all_streams_of_a_step_are_told_in_one_call(engine: Batching) -> None:
    woken: list[list[Stream]] = []
    with engine.together:
        streams = [engine.submit(Request(list(range(9)), 20, KINDS[0]), woken.append) for _ in range(3)]
    assert [len(list(stream)) for stream in streams] == [20] * 3
    deadline = time.monotonic() + 10
    while not woken and time.monotonic() < deadline:
        time.sleep(0.01)  # the last call comes after the events
    assert woken and all(some == streams for some in woken) and len(woken) <= 20


def test_a_deadline_ends_an_answer_with_what_there_is(engine: Batching) -> None:
    events = list(engine.submit(request(3, 400, deadline_s=time.monotonic() + 0.05)))
    assert events[-1].finish_reason == "timeout" and len(events) < 400


def test_what_cannot_be_computed_is_refused(engine: Batching) -> None:
    for wrong in (Request([], 5), Request([1, 10**6], 5), Request([1] * 512, 5), Request([1], 0)):
        with pytest.raises(UsageError):
            engine.submit(wrong)
    with pytest.raises(OverloadedError) as full:
        for index in range(200):
            engine.submit(request(index % 12, 300))
    assert full.value.retry_after_s >= 1


def test_a_failing_kernel_ends_its_requests_and_the_engine_goes_on(
    engine: Batching, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(engine.submit(request(2)))

    def failing(*arguments: object) -> None:
        raise RuntimeError("the kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core.executor, "_decode", failing)
        ends = [list(stream)[-1] for stream in [engine.submit(request(index)) for index in range(3)]]
    assert {end.finish_reason for end in ends} == {"error"}
    assert all(isinstance(end.error, ComputeError) and "the kernel failed" in str(end.error) for end in ends)
    assert tokens_of(engine.submit(request(2))) == expected


def test_keys_that_are_not_finite_end_their_request_alone(engine: Batching) -> None:
    """NaN in the pages of one sequence, while others run beside it and after it on the same pages."""
    expected = [tokens_of(engine.submit(request(index, 60))) for index in (4, 6)]
    streams = [engine.submit(request(index, 60, namespace="other")) for index in (4, 5, 6)]
    next(iter(streams[1]))
    done = []

    def poison() -> None:
        sequence = engine._answers.answers[streams[1].id].sequence
        assert sequence is not None  # nobody takes its 60 tokens before this
        for layer in engine._core.executor.states:
            tvm_runtime.array(layer)[sequence.tables[0][0]] = -1
        done.append(True)

    engine._commands.put(poison)
    last = list(streams[1])[-1]
    assert done and last.finish_reason == "error" and "not finite" in str(last.error)
    others = [tokens_of(stream) for stream in (streams[0], streams[2])]
    assert others == expected
    assert tokens_of(engine.submit(request(5, 20)))[-1][0] is not None


class _Failing:
    """A grammar that cannot continue at its third token."""

    ended = False

    def __init__(self) -> None:
        self.filled = 0

    def matcher(self) -> _Failing:
        return self

    def ready(self) -> bool:
        return True

    def allowed(self, draft: list[int]) -> int:
        return 0

    def fill(self, words: NDArray[np.int32], ahead: tuple[int, ...]) -> None:
        assert not ahead
        self.filled += 1
        if self.filled == 3:
            raise UsageError("the grammar cannot be followed")
        words[:] = -1

    def accept(self, token: int) -> None:
        pass


def test_a_grammar_that_fails_ends_its_request_alone(engine: Batching) -> None:
    expected = [tokens_of(engine.submit(request(index))) for index in (0, 2)]
    streams = [engine.submit(one) for one in (request(0), request(4, grammar=_Failing()), request(2))]
    events = list(streams[1])
    assert [event.finish_reason for event in events] == [None, None, "error"]
    assert "grammar" in str(events[-1].error)
    assert [tokens_of(streams[0]), tokens_of(streams[2])] == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_ends_all_requests(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Batching(bundle, kv_tokens=2048)
    streams = [engine.submit(request(index, 400)) for index in range(3)]
    next(iter(streams[2]))

    def failing(*arguments: object) -> None:
        raise AssertionError("pages are lost")

    monkeypatch.setattr(engine._scheduler, "plan", failing)
    ends = [list(stream)[-1] for stream in streams]
    assert {end.finish_reason for end in ends} == {"error"} and "pages are lost" in str(ends[0].error)
    assert "pages are lost" in engine.fault
    with pytest.raises(OverloadedError, match="pages are lost"):
        engine.submit(request(0))
    engine.close()


def test_a_request_that_waits_is_told_how_long(bundle: LoadedBundle) -> None:
    """Until its prompt is computed, not until its first token."""
    engine = Batching(bundle, kv_tokens=512, max_sequences=1)
    began = time.monotonic()
    streams = [engine.submit(request(index, 60)) for index in (0, 2)]
    first, second = (list(stream) for stream in streams)
    engine.close()
    assert 0 < first[0].queued_s < second[0].queued_s < time.monotonic() - began
    assert len({event.queued_s for event in second}) == 1


def test_random_numbers_are_philox() -> None:
    """Known answers of Random123 for Philox4x32-10."""
    for key, word, answer in (
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (2**64 - 1, 2**32 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        assert philox(key, [np.uint64(word)] * 4) == answer
    numbers, again = Uniforms(7), Uniforms(7)
    draws = np.array([numbers.at(position) for position in range(4000)])
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02
    assert all(again.at(position) == draws[position] for position in (3999, 255, 256, 0, 1000, 999))


@pytest.mark.parametrize("right", [True, False])
def test_drafts_change_no_token_and_no_probability(bundle: LoadedBundle, right: bool) -> None:
    """A prediction that is the answer, and one that is its beginning; alone, and four together."""
    plain = Batching(bundle, kv_tokens=2048, drafts=False)
    requests = [replace(request(index, 60), logprobs=1, deterministic=True) for index in range(1, 5)]
    expected = [list(plain.submit(one)) for one in requests]
    plain.close()
    engine = Batching(bundle, kv_tokens=2048)
    engine._scheduler.cost = CostModel(learn=False)  # else drafts are checked where they save time on this machine
    for i, events in enumerate(expected):
        answer = [event.token for event in events]
        predicted = answer if right else [*answer[:20], 1999, *answer[25:40], 1998]
        requests[i] = replace(requests[i], prediction=tuple(predicted))
    streams = [list(engine.submit(one)) for one in requests]
    with engine.together:
        together = [engine.submit(one) for one in requests]
    streams += map(list, together)
    stats = engine.stats()
    engine.close()
    assert [[one[:4] for one in stream] for stream in streams] == [[one[:4] for one in event] for event in expected * 2]
    checked = [stream[-1].prediction for stream in streams[:4]]
    assert all(counts[0] > 10 for counts in checked) and stats.accepted >= sum(counts[0] for counts in checked)
    assert stats.drafted > stats.accepted or right
    wrong = sorted(counts[1] / counts[0] for counts in checked)
    assert wrong[1] < 0.1 if right else wrong[-1] > 0  # an answer that repeats itself is found in wrong places too


def test_drafts_follow_a_grammar(bundle: LoadedBundle, demo: Engine) -> None:
    pytest.importorskip("llguidance", reason="llguidance computes the masks")
    compiler = GrammarCompiler(demo.tokenizer, bundle.manifest.model.vocab_size)
    grammar = compiler.compile(GrammarSource("json_schema", json.dumps({"enum": [["one", "two"] * 8, ["two"] * 9]})))
    found = []
    for drafts in (False, True):
        engine = Batching(bundle, kv_tokens=2048, drafts=drafts)
        engine._scheduler.cost = CostModel(learn=False)
        for params in KINDS:
            predicted = tuple(found[0]) if drafts else ()
            stream = engine.submit(Request([5, 6, 7], 100, params, grammar=grammar, prediction=predicted))
            found.append([event.token for event in stream])
        stats = engine.stats()
        engine.close()
    assert found[4:] == found[:4] and stats.accepted > 10


def test_a_prefix_goes_to_another_engine_between_steps(bundle: LoadedBundle, engine: Batching) -> None:
    """Beside answers; what has no room is refused, and an engine that ends says so."""
    prompt = replace(request(10, 1), deterministic=True)
    computed = tokens_of(engine.submit(prompt))
    full = prompt.tokens[: len(prompt.tokens) // 16 * 16]
    kept, pages = engine.copy_prefix(full).result(20)
    assert kept == len(full) and [len(layer) for layer in pages] == [kept // 16] * bundle.manifest.model.num_layers
    assert engine.copy_prefix([7] * 64).result(20)[0] == 0
    saved = SavedChat(full, len(full), None, pages)
    other = Batching(bundle, kv_tokens=512, max_queue=4)
    running = other.submit(request(2, 200))
    for _ in range(3):
        other.restore_prefix(saved).result(20)
    event, *_ = other.submit(prompt)
    assert (event.token, event.cached_tokens) == (computed[0][0], len(full))
    assert np.array_equal(np.array(other.copy_prefix(full).result(20)[1]), np.array(pages))
    assert len(tokens_of(running)) == 200
    assert other.stats().kv_usage == 0
    with pytest.raises(ResourceError, match="no room"):
        other.restore_prefix(replace(saved, tokens=[*range(9, 649)])).result(20)
    assert other.stats().kv_usage == 0
    other.close()
    with pytest.raises(OverloadedError):
        other.restore_prefix(saved)
