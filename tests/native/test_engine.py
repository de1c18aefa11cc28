"""The native runtime computes and draws what Python's engine does: the same tokens, the same bits of logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlcpipe import Engine
from mlcpipe.bundle import read_manifest
from mlcpipe.errors import UsageError
from tests.conftest import Bundles
from tests.native.engine import NativeEngine, Runtime
from tests.native.prompts import GREEDY, SETTINGS, prompt

pytestmark = pytest.mark.full  # compiles TVM's runtime
Copy = Callable[[Path], Path]


@pytest.fixture
def native(demo_bundles: Bundles, runtime: Runtime, copy_of: Copy) -> NativeEngine:
    return runtime.open(copy_of(demo_bundles["q4f16_1"]), threads=2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_those_of_python(setting: str, native: NativeEngine, demo: Engine) -> None:
    """300 tokens: more than entries that penalties begin with."""
    tokens, params = prompt(60, demo.vocab_size), SETTINGS[setting]
    demo.reset()
    expected = demo.generate(tokens, sampling=params, max_tokens=300, ignore_eos=True)
    found = native.generate(tokens, params, max_tokens=300)
    assert found.tokens == expected.token_ids
    assert (found.finish, found.decode_bytes) == ("length", expected.stats.decode_bytes)
    assert len(set(found.tokens)) > 3


def test_the_next_turn_computes_what_is_new(native: NativeEngine, demo: Engine) -> None:
    demo.reset()
    tokens = prompt(100, demo.vocab_size)
    for turn, added in enumerate((0, 1, 40)):
        tokens = tokens + prompt(added, demo.vocab_size, turn)
        expected = demo.generate(tokens, sampling=GREEDY, max_tokens=20, ignore_eos=True)
        found = native.generate(tokens, max_tokens=20)
        assert found.tokens == expected.token_ids
        assert (found.prompt_tokens, found.cached_tokens) == (len(tokens), expected.stats.cached_tokens)
        tokens = tokens + found.tokens
    assert found.cached_tokens > 100


def test_conversations_take_turns(native: NativeEngine, demo: Engine) -> None:
    """Each computes only what is new, although others answered in between, until their pages are needed."""
    count, vocab = native.context_length // 4, native.vocab_size
    firsts = [prompt(40, vocab, 9) + prompt(count - 40, vocab, number) for number in range(3)]
    expected = []
    for first in firsts:
        demo.reset()
        answer = demo.generate(first, sampling=GREEDY, max_tokens=20, ignore_eos=True).token_ids
        second = first + answer + prompt(5, vocab, 99)
        expected.append((answer, demo.generate(second, sampling=GREEDY, max_tokens=20, ignore_eos=True).token_ids))
    opening = [native.generate(first, max_tokens=20) for first in firsts]
    assert [answer.tokens for answer in opening] == [first for first, _ in expected]
    assert [answer.cached_tokens for answer in opening] == [0, 40, 40]
    seconds = [first + answer.tokens + prompt(5, vocab, 99) for first, answer in zip(firsts, opening)]
    closing = [native.generate(second, max_tokens=20) for second in seconds]
    assert [answer.tokens for answer in closing] == [second for _, second in expected]
    assert [answer.cached_tokens for answer in closing] == [(count + 19) // 16 * 16] * 3
    native.generate(prompt(native.context_length - 1, vocab, 5))
    assert native.generate(seconds[0], max_tokens=1).cached_tokens <= 16  # one page was not needed
    native.generate(prompt(60, vocab, 5), max_tokens=20)
    native.call("reset")
    assert native.generate(prompt(60, vocab, 5), max_tokens=1).cached_tokens == 0


def test_a_stop_id_ends_the_answer(native: NativeEngine) -> None:
    tokens = prompt(30, native.vocab_size)
    answer = native.generate(tokens, SETTINGS["drawn"], max_tokens=50).tokens
    native.call("reset")  # a prompt that is found is continued with the arithmetic of answers
    stopped = native.generate(tokens, SETTINGS["drawn"], max_tokens=50, stop_ids=[answer[10], -1])
    assert (stopped.finish, stopped.tokens) == ("stop", answer[: answer.index(answer[10]) + 1])


def test_an_answer_ends_where_the_context_does(native: NativeEngine) -> None:
    answer = native.generate(prompt(native.context_length - 5, native.vocab_size))
    assert (answer.finish, len(answer.tokens)) == ("length", 5)


@pytest.mark.parametrize("quantization", [pytest.param("q8f16_1", marks=pytest.mark.everything), "q4f16_1"])
def test_every_variant_gives_the_same_bits_as_in_python(
    quantization: str, runtime: Runtime, copy_of: Copy, all_variants: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = all_variants[quantization]
    variants = [variant.name for variant in read_manifest(bundle).target.variants]
    tokens, ran = prompt(250, 300), 0
    for variant in variants:
        monkeypatch.setenv("MLCPIPE_CPU_VARIANT", variant)
        try:
            expected = Engine(bundle, threads=2)
        except UsageError:  # of a CPU with more instructions
            continue
        native = runtime.open(copy_of(bundle), variant=variant, threads=2)
        assert native.variant == variant
        np.testing.assert_array_equal(native.logits(tokens), expected.logits(tokens))
        native.close()
        ran += 1
    assert ran >= 1
