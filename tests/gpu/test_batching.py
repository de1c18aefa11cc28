"""On a GPU, too, a request gives the same logits, bit by bit, whatever runs beside it, and however its prompt is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from mlcpipe.runtime.loading import load_bundle
from tests.gpu.conftest import Gpu
from tests.models import tiny
from tests.models.stepping import Alone, Steps

# Plain layers, sliding layers beside others, experts, delta nets; without subgroups, and with those of the device; pages in int8.
CASES = (
    pytest.param("llama-q4f16_1-auto-plain", marks=pytest.mark.everything),
    pytest.param("gemma2-q0f32-auto-plain", marks=pytest.mark.everything),
    "qwen3_moe-q4f16_1-auto-suited",
    "llama-q4f16_1-auto-half",
    pytest.param("llama-q4f16_1-q8-plain", marks=pytest.mark.everything),
    "gemma2-q0f32-q8-suited",
    pytest.param("llama-q4f16_1-q8-half", marks=pytest.mark.everything),
    pytest.param("qwen3_5_text-q0f32-auto-plain", marks=pytest.mark.everything),
)
LENGTHS = (1, 33, 17, 40, 16)
ANSWER = 5


@pytest.mark.parametrize("case", CASES)
def test_together_each_says_what_it_says_alone(case: str, gpu: Gpu, tmp_path: Path) -> None:
    """In a batch; and with prompts in other chunks, beside answers, sharing pages."""
    family, quantization, kv_cache_dtype, target = case.split("-", 3)
    checkpoint = tiny.write_tiny(tiny.TinyCase(family, "default"), tmp_path / "checkpoint")
    target = getattr(gpu, target)
    options = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    bundle = mlcpipe.compile(checkpoint, target=target, output=tmp_path / "bundle", **options)
    alone = Alone.of(load_bundle(Path(bundle)), LENGTHS, ANSWER)
    alone.check(Steps(alone.bundle))
    steps = Steps(alone.bundle, limits=replace(Steps(alone.bundle).limits, prefill_chunk=24, step_s=0.03))
    alone.check(steps, stagger=2)
    # States in slots need a checkpoint where prompts part; these have none there.
    assert (steps.scheduler.totals.prefix_hits > 0) == (steps.scheduler.pool.slots is None)
