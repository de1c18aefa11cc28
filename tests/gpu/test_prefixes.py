"""Prompts that were computed on the device come back from a file, there and on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.errors import ResourceError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.server.prefix_store import PrefixStore
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.gpu.conftest import Gpu

TOKENS = 5 * 16


@contextmanager
def opened(bundle: Path) -> Iterator[Batching]:
    engine = Batching(load_bundle(bundle, 256, 2), kv_tokens=256)
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: Batching, tokens: list[int], count: int = 6) -> tuple[list[int | None], int]:
    """A greedy answer, and how many tokens of its prompt were not computed."""
    request = Request(tokens, count, SamplingParams(temperature=0.0), deterministic=True)
    events = list(engine.submit(request))
    return [event.token for event in events], events[-1].cached_tokens


def test_a_saved_prompt_is_not_computed_again(gpu: Gpu, tmp_path: Path) -> None:
    """Also where its pages do not lie side by side."""
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(head_dim=32))
    options = {"quantization": "q0f32", "kv_cache_dtype": "q8"}
    bundle = mlcpipe.compile(checkpoint, target=gpu.plain, output=tmp_path / "gpu", **options)
    rng = random.Random(1)
    prompt, others = [[rng.randrange(3, 256) for _ in range(TOKENS + 1)] for _ in range(2)]
    (folder := tmp_path / "prefixes").mkdir()
    store = PrefixStore(folder, load_bundle(bundle, 256, 2).manifest, 256)
    with opened(bundle) as engine:
        expected, cached = answer(engine, prompt)
        kept, layers = engine.copy_prefix(prompt[:TOKENS]).result()
        assert (cached, kept) == (0, TOKENS) and all(len(pages) == TOKENS // 16 and pages.any() for pages in layers)
        store.write("a", prompt[:TOKENS], layers, "")
        assert answer(engine, prompt) == (expected, TOKENS)
    with opened(bundle) as engine:
        for length in (33, 60, 17):
            answer(engine, rng.choices(others, k=length))
        engine.restore_prefix(store.read("a", "")).result()
        assert answer(engine, prompt) == (expected, TOKENS)
        _, again = engine.copy_prefix(prompt[:TOKENS]).result()
        assert all((one == other).all() for one, other in zip(again, layers, strict=True))
        long = engine.submit(Request(rng.choices(others, k=200), 50, SamplingParams(temperature=0.0)))
        next(iter(long))
        with pytest.raises(ResourceError, match="no room for the prefix"):
            engine.restore_prefix(store.read("a", ""), "another").result()
    cpu = mlcpipe.compile(checkpoint, target=QUICK, output=tmp_path / "cpu", **options)
    with opened(cpu) as engine:
        engine.restore_prefix(store.read("a", "")).result()
        found, cached = answer(engine, prompt)
        assert (found[0], cached) == (expected[0], TOKENS)
