"""Models compiled for WebGPU give the logits and tokens that the CPU's engine gives for the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

import mlcpipe
from tests.models import tiny

from . import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

EXACT = 'description = "this CPU, activations in float32"\nbase = "cpu-native"\n[schedule]\nint8_activations = 0\n'
CONTEXT, CHUNK, PROMPT, STEPS = 128, 8, 20, 12
# Windows and two kinds of RoPE, softcap, biases, experts and routers: what the families have between them.
FAMILIES = ("llama", "gemma2", "qwen2", "qwen3_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logits_equal_the_cpu_engine(family: str, tmp_path: Path) -> None:
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    exact = tmp_path / "exact.toml"
    exact.write_text(EXACT, encoding="utf-8")
    for target, name in (("webgpu", "web"), (str(exact), "cpu")):
        mlcpipe.compile(
            checkpoint,
            target=target,
            quantization="q4f32_1",
            kv_cache_dtype="f32",
            output=tmp_path / name,
            context_length=CONTEXT,
            quick=True,
        )
    prompt = list(map(int, tiny.prompt_tokens(case, PROMPT)))
    # Chunks of 8 tokens, so that prefill attends to cached pages too; a prompt of one token decodes alone.
    long, short = dawn.generate(tmp_path / "web", [prompt, prompt[:1]], STEPS, CONTEXT, CHUNK)
    engine = mlcpipe.Engine(tmp_path / "cpu")
    for start, run in ((prompt, long), (prompt[:1], short)):
        engine.reset()
        expected = engine.logits([*start, *run.tokens[:-1]])[len(start) - 1 :]
        np.testing.assert_allclose(run.logits, expected, rtol=0, atol=3e-5 * float(np.abs(expected).max()))
        assert run.tokens == expected.argmax(axis=1).tolist()
