"""Several answers at once: each has the tokens that it has alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlcpipe import SamplingParams
from tests.conftest import Bundles
from tests.native.engine import CANCELLED, RESOURCE, USAGE, Answer, NativeEngine, NativeError, Runtime
from tests.native.prompts import SETTINGS, prompt

pytestmark = pytest.mark.full  # compiles TVM's runtime
LENGTHS = (3, 15, 16, 17, 60, 130, 200, 33)


@pytest.fixture
def bundle(demo_bundles: Bundles, copy_of: Callable[[Path], Path]) -> Path:
    return copy_of(demo_bundles["q4f16_1"])


@pytest.fixture
def asked() -> list[tuple[list[int], SamplingParams]]:
    settings = list(SETTINGS.values())
    return [(prompt(length, 250, length), settings[i % len(settings)]) for i, length in enumerate(LENGTHS)]


def alone(runtime: Runtime, bundle: Path, asked: Any, max_tokens: int, **options: Any) -> list[list[int]]:
    engine, answers = runtime.open(bundle, threads=2, **options), []
    for tokens, params in asked:
        engine.call("reset")
        answers.append(engine.generate(tokens, params, max_tokens=max_tokens).tokens)
    engine.close()
    return answers


def run(engine: NativeEngine) -> int:
    """The number of steps until nothing is left."""
    steps = 1
    while engine.step():
        steps += 1
    return steps


class Order:
    """Whose tokens came, in turn."""

    def __init__(self) -> None:
        self.turns: list[int] = []

    def of(self, index: int) -> Callable[[int], int]:
        def came(token: int) -> int:
            self.turns.append(index)
            return 0

        return came

    def longest_wait(self) -> int:
        """The most tokens of others between two of one answer."""
        places = [[at for at, one in enumerate(self.turns) if one == index] for index in set(self.turns)]
        return max(b - a for several in places for a, b in zip(several, several[1:]))


def ended(one: Any) -> Answer:
    assert isinstance(one.end, Answer), one.end
    assert one.end.tokens == one.tokens and one.end.completion_tokens == len(one.tokens)
    return one.end


@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_each_has_the_tokens_that_it_has_alone(sequences: int, asked: Any, runtime: Runtime, bundle: Path) -> None:
    expected = alone(runtime, bundle, asked, 40)
    engine = runtime.open(bundle, threads=2, sequences=sequences)
    several = [engine.submit(tokens, params, max_tokens=40) for tokens, params in asked[:5]]
    for _ in range(4):
        engine.step()
    several += [engine.submit(tokens, params, max_tokens=40) for tokens, params in asked[5:]]
    steps = run(engine)
    assert [ended(one).tokens for one in several] == expected
    assert {ended(one).finish for one in several} == {"length"} and steps < 8 * 40 // sequences + 30
    again = engine.submit(*asked[6], max_tokens=40)  # from the tree's pages of its prompt
    run(engine)
    assert ended(again).tokens == expected[6] and ended(again).cached_tokens >= 176
    engine.close()


def test_prefixes_give_their_pages_to_others(runtime: Runtime, bundle: Path, asked: Any) -> None:
    """30 pages for prompts and answers of 46."""
    expected = alone(runtime, bundle, asked, 30, context_length=240)
    engine = runtime.open(bundle, threads=2, sequences=2, context_length=240)
    several = [engine.submit(*one, max_tokens=30) for one in asked]
    run(engine)
    assert sum(-(-(len(tokens) + 29) // 16) for tokens, _ in asked) == 46
    assert [ended(one).tokens for one in several] == expected


def test_a_pool_that_is_too_small_preempts(runtime: Runtime, bundle: Path, asked: Any) -> None:
    """17 pages for four answers that end with 11 to 14 each."""
    wanted = [(tokens, params) for tokens, params in asked if len(tokens) in (15, 16, 33, 60)]
    expected, order = alone(runtime, bundle, wanted, 150), Order()
    engine = runtime.open(bundle, threads=2, sequences=4, context_length=272, kv_tokens=272)
    several = [engine.submit(*one, max_tokens=150, on_token=order.of(i)) for i, one in enumerate(wanted)]
    run(engine)
    assert [ended(one).tokens for one in several] == expected
    assert order.longest_wait() > 50
    for wrong in (271, 4 * 272 + 1):
        with pytest.raises(NativeError, match="kv_tokens; expected 272 to 1088"):
            runtime.open(bundle, sequences=4, context_length=272, kv_tokens=wrong)


def test_the_higher_class_takes_the_place_of_the_lower(runtime: Runtime, bundle: Path, asked: Any) -> None:
    expected, order = alone(runtime, bundle, asked[3:6], 30), Order()
    engine = runtime.open(bundle, threads=2, sequences=1)
    low = engine.submit(*asked[3], max_tokens=30, priority=-1, on_token=order.of(0))
    for _ in range(10):
        engine.step()
    usual = engine.submit(*asked[4], max_tokens=30, on_token=order.of(1))
    high = engine.submit(*asked[5], max_tokens=30, priority=1, on_token=order.of(2))
    run(engine)
    assert [ended(one).tokens for one in (low, usual, high)] == expected
    begun = order.turns.index(2)
    assert 5 < begun <= 10 and order.turns == [0] * begun + [2] * 30 + [1] * 30 + [0] * (30 - begun)
    for wrong in (2, -2):
        with pytest.raises(NativeError, match="priority; expected -1, 0 or 1"):
            engine.submit([1], priority=wrong)


def test_an_answer_ends_at_its_time(runtime: Runtime, bundle: Path, asked: Any) -> None:
    expected = alone(runtime, bundle, asked[:2], 200)

    def slow(token: int) -> int:
        time.sleep(0.02)
        return 0

    engine = runtime.open(bundle, threads=2, sequences=1)
    late = engine.submit(*asked[0], max_tokens=200, on_token=slow, timeout_s=0.3)
    waiting = engine.submit(*asked[1], max_tokens=200, timeout_s=0.2)
    other = engine.submit(*asked[1], max_tokens=200)
    run(engine)
    assert ended(late).finish == "timeout" and 0 < len(late.tokens) < 200
    assert late.tokens == expected[0][: len(late.tokens)]
    assert ended(waiting).finish == "timeout" and not waiting.tokens
    assert ended(other).tokens == expected[1]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(NativeError, match="timeout_s; expected 0 to 1e9 seconds"):
            engine.submit([1], timeout_s=wrong)


def test_a_cancel_changes_no_other(runtime: Runtime, bundle: Path, asked: Any) -> None:
    expected = alone(runtime, bundle, asked, 30)
    engine = runtime.open(bundle, threads=2, sequences=8)
    several = [engine.submit(*one, max_tokens=30) for one in asked]
    for _ in range(6):
        engine.step()
    several[2].cancel()
    thread = threading.Thread(target=several[7].cancel)
    thread.start()
    thread.join()
    run(engine)
    for index, one in enumerate(several):
        if index in (2, 7):
            assert isinstance(one.end, NativeError) and one.end.code == CANCELLED
            assert one.tokens == expected[index][: len(one.tokens)] and len(one.tokens) < 30
        else:
            assert ended(one).tokens == expected[index]
    several[2].cancel()  # of an answer that has ended
    assert engine.step() == 0


def test_ends_and_refusals(runtime: Runtime, bundle: Path) -> None:
    engine = runtime.open(bundle, threads=2, sequences=2, context_length=64)
    full = engine.submit(prompt(50, 250))
    stopped = engine.submit(prompt(10, 250), max_tokens=20, on_token=lambda token: 1)
    long = engine.submit(prompt(64, 250))
    run(engine)
    assert ended(full).finish == "length" and len(full.tokens) == 14
    assert isinstance(stopped.end, NativeError) and stopped.end.code == CANCELLED and len(stopped.tokens) == 1
    assert isinstance(long.end, NativeError) and long.end.code == USAGE and "too long" in str(long.end)
    for wrong in ([], [10**6], [-1]):
        with pytest.raises(NativeError, match="token ids"):
            engine.submit(wrong)
    with pytest.raises(NativeError, match="several answers at once"):
        engine.generate([1, 2])
    many = [engine.submit([1, 2, 3], max_tokens=1) for _ in range(300)]
    run(engine)
    refused = [one.end for one in many if isinstance(one.end, NativeError)]
    assert len(refused) == 300 - 256 and {error.code for error in refused} == {RESOURCE}
    single = runtime.open(bundle, threads=2)
    with pytest.raises(NativeError, match="one answer at a time"):
        single.step()
    with pytest.raises(NativeError, match="sequences; expected 0 to 8; found 9"):
        runtime.open(bundle, sequences=9)
