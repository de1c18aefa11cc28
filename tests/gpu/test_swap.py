"""A sequence that was preempted on a GPU, its pages on the host meanwhile, answers as it does alone, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import mlcpipe
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.memory import FreeMemory
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.executor import Executor
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.open_engine import open_engine
from mlcpipe.runtime.serving.state_store import UnitBytes
from mlcpipe.runtime.serving.swap import Swap
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.gpu.conftest import Gpu
from tests.models.stepping import Alone, Steps, prompts

LENGTHS, ANSWER = (1, 33, 90, 70, 40, 60, 80, 17, 50, 25), 60
ROOM = 1 << 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("swap") / "checkpoint", TinyLlama(head_dim=32))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, gpu: Gpu) -> LoadedBundle:
    options = {"quantization": "q0f32", "kv_cache_dtype": "q8"}
    output = checkpoint.parent / gpu.plain
    return load_bundle(mlcpipe.compile(checkpoint, target=gpu.plain, output=output, **options), 256, 2)


@contextmanager
def opened(bundle: LoadedBundle, kv_tokens: int, swap_bytes: int) -> Iterator[Batching]:
    engine = Batching(bundle, kv_tokens=kv_tokens, swap_bytes=swap_bytes)
    if swap := engine._core.scheduler.admission.swap:
        always(swap)
    try:
        yield engine
    finally:
        engine.close()


def always(swap: Swap) -> None:
    """Whatever a copy takes: what a row takes on a device of software says nothing."""
    assert swap.rate > 0
    swap.is_cheaper = Mock(return_value=True)  # type: ignore[method-assign]


def test_pages_are_copied_one_run_at_a_time(bundle: LoadedBundle) -> None:
    executor = Steps(bundle, kv_tokens=256).core.executor
    nbytes = sum(state.unit_bytes for state in bundle.manifest.states)
    written = np.random.default_rng(1).integers(-128, 128, (5, nbytes), np.int8)
    executor.copy_in(range(16), np.zeros((16, nbytes), np.int8))
    executor.copy_in([7, 2, 15, 3, 8], written)
    found = executor.copy_out([8, 3, 0, 2, 15, 7])
    np.testing.assert_array_equal(found, [written[4], written[3], 0 * written[0], written[1], written[2], written[0]])


def test_logits_are_those_of_sequences_that_never_gave_way(bundle: LoadedBundle) -> None:
    """In batches of mixed lengths; also where the host has room for two pages, and where every other copy fails."""
    alone = Alone.of(bundle, LENGTHS, ANSWER)
    for pages, fails in ((1000, False), (2, False), (1000, True)):
        steps = Steps(bundle, kv_tokens=256, swap_bytes=ROOM)
        swap, executor = steps.scheduler.admission.swap, steps.core.executor
        assert swap is not None
        always(swap)
        swap.room = pages * swap.page_bytes
        if fails:
            fail_half_way(executor)
        alone.check(steps)
        assert swap.tokens_out - fails >= swap.tokens_in > 0 == swap.bytes


def fail_half_way(executor: Executor) -> None:
    """Every other copy to the device, with one state overwritten."""
    calls, copy_in = itertools.count(), executor.copy_in

    def failing(ids: Sequence[int], pages: UnitBytes) -> None:
        if next(calls) % 2 == 0:
            first = executor.bundle.manifest.states[0].unit_bytes
            executor.write_units(0, ids, pages[:, :first] + 1)
            raise ResourceError("no memory")
        copy_in(ids, pages)

    executor.copy_in = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_answers_as_with_pages_for_all(bundle: LoadedBundle, temperature: float) -> None:
    """Tokens, and their log-probabilities; its statistics say what was copied."""
    several = prompts(bundle.manifest.model.vocab_size, LENGTHS, seed=2)
    found = []
    for kv_tokens, room in ((2048, 0), (256, ROOM)):
        with opened(bundle, kv_tokens, room) as engine:
            with engine.together:
                streams = [
                    engine.submit(Request(prompt, ANSWER, SamplingParams(temperature, seed=5), logprobs=0))
                    for prompt in several
                ]
            found.append([[(event.token, event.logprob) for event in stream] for stream in streams])
            stats = engine.stats()
            assert bool(room) == bool(stats.preemptions) == bool(stats.swapped_out) == bool(stats.swapped_in)
            assert stats.swap_bytes == 0
    assert found[0] == found[1]


def test_how_much_the_host_keeps(bundle: LoadedBundle, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what is free beside the KV cache, unless it is said; a CPU has nowhere to copy to."""
    free, rooms = FreeMemory(1 << 30), []
    monkeypatch.setattr("mlcpipe.runtime.serving.open_engine.free_memory", lambda: free)
    options: dict[str, Any] = {"max_queue": 4, "sequences": 2, "step_s": 0.1, "drafts": False}
    for asked in (None, 12345, 0):
        engine: Any = open_engine(bundle, **options, swap_bytes=asked)
        swap = engine._core.scheduler.admission.swap
        rooms.append(0 if swap is None else swap.room)
        engine.close()
    kv_bytes = 2 * 256 * bundle.manifest.kv_bytes_per_token
    assert rooms == [(free.nbytes - kv_bytes) // 4, 12345, 0]
    with pytest.raises(ResourceError, match="not enough memory for --swap-bytes"):
        open_engine(bundle, **options, swap_bytes=2 << 30)
    cpu = mlcpipe.compile(checkpoint, target=QUICK, output=checkpoint.parent / "cpu", quantization="q0f32")
    for asked in (None, 0):
        engine = open_engine(load_bundle(cpu, 256, 2), **options, swap_bytes=asked)
        assert engine._core.scheduler.admission.swap is None
        engine.close()
    with pytest.raises(UsageError, match="--swap-bytes; expected a model on a GPU whose layers keep all tokens"):
        open_engine(load_bundle(cpu, 256, 2), **options, swap_bytes=1)
