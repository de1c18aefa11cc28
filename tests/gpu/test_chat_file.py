"""A chat that was computed on the device continues there as without a file, and on the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import Engine, SamplingParams
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.gpu.conftest import Gpu

GREEDY = SamplingParams(temperature=0.0)


# Codes: tests/native/test_vulkan.py.
@pytest.mark.parametrize(
    "kv_cache_dtype", ["f32", *(pytest.param(name, marks=pytest.mark.everything) for name in ("q8", "q4"))]
)
def test_a_saved_chat(kv_cache_dtype: str, gpu: Gpu, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(head_dim=32))
    options = {"quantization": "q0f32", "kv_cache_dtype": kv_cache_dtype}
    bundle = mlcpipe.compile(checkpoint, target=gpu.plain, output=tmp_path / "gpu", **options)
    engine, file = Engine(bundle), tmp_path / "chat"
    tokens = random.Random(1).choices(range(272), k=30)
    tokens += engine.generate(tokens, sampling=GREEDY, max_tokens=9, ignore_eos=True).token_ids
    engine.save(file, chat={"a": 1})
    turn = [*tokens, 7]
    expected = engine.generate(turn, sampling=GREEDY, max_tokens=20, ignore_eos=True)
    engine.generate(tokens[::-1], sampling=GREEDY, max_tokens=1, ignore_eos=True)
    for other in (engine, Engine(bundle)):
        assert other.load(file) == {"a": 1}
        found = other.generate(turn, sampling=GREEDY, max_tokens=20, ignore_eos=True)
        assert (found.token_ids, found.stats.cached_tokens) == (expected.token_ids, 38)
    assert engine.load(file)
    engine.save(tmp_path / "again", chat={"a": 1})
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    cpu = Engine(mlcpipe.compile(checkpoint, target=QUICK, output=tmp_path / "cpu", **options), threads=2)
    cpu.load(file)
    on_cpu = cpu.generate(turn, sampling=GREEDY, max_tokens=3, ignore_eos=True)
    assert on_cpu.stats.cached_tokens == 38 and on_cpu.token_ids[0] == expected.token_ids[0]
