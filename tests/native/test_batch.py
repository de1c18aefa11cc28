"""Several answers at once: each has the tokens that it has alone."""

from __future__ import annotations

import threading
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
