"""A signal in the middle of a prefill: it is handled within a part of a chunk, and the cache keeps what came before."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from tests.conftest import QUICK, Bundles, TinyLlama, write_llama

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps TVM's pool")

CONTEXT = 2048
GREEDY = SamplingParams(temperature=0.0)


@contextmanager
def alarm(after_s: float, handler: Callable[[int, Any], Any] = signal.default_int_handler) -> Iterator[None]:
    """Inside, a signal comes once, `after_s` from now; by default it does what Ctrl-C does."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


@pytest.fixture(scope="module")
def engine(demo_bundles: Bundles) -> Engine:
    return Engine(demo_bundles["q4f16_1"], context_length=CONTEXT)


class Interrupts:
    """Calls that are interrupted at random times: most of them, however fast the machine is at the moment.

    A call that ends before its signal halves the longest time until the next, one that is interrupted adds a fifth.
    """

    def __init__(self, seed: int) -> None:
        self.count = 0
        self._draw, self._within_s = random.Random(seed), 0.5

    def interrupt(self, work: Callable[[], object]) -> None:
        """Call `work`, and count it if the signal ends it."""
        try:
            with alarm(self._draw.uniform(1e-4, self._within_s)):
                work()
            self._within_s /= 2
        except KeyboardInterrupt:
            self.count += 1
            self._within_s *= 1.2


def token_after(engine: Engine, tokens: list[int]) -> int:
    return engine.generate(tokens, sampling=GREEDY, max_tokens=1, ignore_eos=True).token_ids[0]


def test_what_came_before_is_kept(engine: Engine) -> None:
    """An interrupted question does not cost the conversation: the next one computes only what is new.

    But where the signal comes in the microseconds in which pages are accounted for: then all is forgotten.
    """
    history, whole = prompt(600), prompt(1800)
    engine.reset()
    expected = token_after(engine, whole)
    interrupts, forgotten = Interrupts(2026), 0
    for _ in range(10):
        engine.reset()
        engine.prefill(history)
        interrupts.interrupt(lambda: engine.prefill(whole[600:]))
        done = engine.generate(whole, sampling=GREEDY, max_tokens=1, ignore_eos=True)
        assert done.token_ids == [expected]
        assert done.stats.cached_tokens in (0, 600, 600 + 512, 600 + 1024, 1799)
        forgotten += done.stats.cached_tokens == 0
    assert forgotten <= 2
    assert interrupts.count


def answers_after_interrupts(engine: Engine, count: int) -> None:
    """After each interrupt at a random time, a conversation continues with the right token."""
    prompts = [[*prompt(400), *prompt(length, length)] for length in (100, 700, 1500)]
    expected = []
    for tokens in prompts:
        engine.reset()
        expected.append(token_after(engine, tokens))
    draw, interrupts = random.Random(2026), Interrupts(2026)
    for _ in range(count):
        tokens = draw.choice(prompts)
        interrupts.interrupt(lambda tokens=tokens: token_after(engine, tokens))
        which = draw.randrange(len(prompts))
        assert token_after(engine, prompts[which]) == expected[which]
    assert interrupts.count > count / 10


def test_answers_after_interrupts_are_right(engine: Engine) -> None:
    answers_after_interrupts(engine, 30)


@pytest.mark.full
def test_interrupts_leave_no_memory(engine: Engine) -> None:
    """A kernel that is stopped gives its workspace back: without that 100 of them leave some 20 MiB."""
    tokens, interrupts, grown = prompt(1500), Interrupts(7), []
    for count in (40, 100):
        before = psutil.Process().memory_info().rss
        for _ in range(count):
            engine.reset()
            interrupts.interrupt(lambda: engine.prefill(tokens))
        grown.append(psutil.Process().memory_info().rss - before)
    assert interrupts.count > 70 and grown[1] < 6 << 20, grown


@pytest.mark.everything
def test_answers_after_many_interrupts_are_right(engine: Engine) -> None:
    answers_after_interrupts(engine, 10_000)


def test_a_handler_that_raises_nothing_stops_nothing(engine: Engine) -> None:
    tokens, calls = prompt(1500), []
    engine.reset()
    expected = token_after(engine, tokens)
    engine.reset()
    with alarm(0.001, lambda number, frame: calls.append(number)):
        assert token_after(engine, tokens) == expected
    assert calls


def test_another_thread_is_not_interrupted(engine: Engine) -> None:
    """Handlers run in the main thread alone, and they are the program's own."""
    tokens, found = prompt(1500), []
    engine.reset()
    expected, before = token_after(engine, tokens), signal.getsignal(signal.SIGINT)
    engine.reset()
    thread = threading.Thread(target=lambda: found.append(token_after(engine, tokens)))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        thread.join()
    thread.join()
    assert found == [expected] and signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """270 million parameters, on one thread: a chunk takes a good part of a second."""
    folder = tmp_path_factory.mktemp("slow")
    sizes = TinyLlama(
        hidden_size=2048,
        intermediate_size=8192,
        layers=4,
        heads=16,
        kv_heads=8,
        head_dim=128,
        positions=CONTEXT,
        dtype="bfloat16",
    )
    mlcpipe.compile(
        write_llama(folder / "checkpoint", sizes), target=QUICK, quantization="q4f16_1", output=folder / "bundle"
    )
    return Engine(folder / "bundle", threads=1)


def chunk_s(engine: Engine) -> float:
    """How long a prefill of a whole chunk takes."""
    seconds = []
    for _ in range(3):
        engine.reset()
        began = time.perf_counter()
        engine.prefill(prompt(engine.manifest.model.prefill_chunk))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@pytest.mark.alone
def test_ctrl_c_does_not_wait_for_the_chunk(slow: Engine) -> None:
    """20 ms to the next look and a task of as long, where half a chunk is the mean without looks."""
    one, tokens, waits = chunk_s(slow), prompt(1024), []
    draw = random.Random(2026)
    for _ in range(20):
        slow.reset()
        after_s, began = draw.uniform(0.1, 1.5) * one, time.perf_counter()
        with pytest.raises(KeyboardInterrupt), alarm(after_s):
            slow.prefill(tokens)
        waits.append(time.perf_counter() - began - after_s)
    assert statistics.median(waits) < one / 8 and max(waits) < one / 3, (one, waits)
