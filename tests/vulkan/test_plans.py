"""A mixture of block formats and MLC's groups has the logits on a GPU that it has on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine
from mlcpipe.devices import vulkan
from mlcpipe.quantization.recipe import recipe_text
from tests.conftest import EXACT, TinyLlama, write_llama

pytestmark = pytest.mark.usefixtures("kernels_are_valid")

# In float16, as the CPU stores norms; some GPUs store them in float32.
SIZES = TinyLlama(hidden_size=256, intermediate_size=512, heads=4, head_dim=64, dtype="float16")
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 40)]
TENSORS = {"model.embed_tokens.weight": "Q6_K", "*.v_proj.weight": "q8f16_1", "*.0.mlp.*": "Q3_K", "*.o_proj.weight": "Q5_0"}  # fmt: skip


@pytest.mark.parametrize("quantization", [pytest.param("q4f16_m", marks=pytest.mark.everything), "plan"])
def test_a_mixture_is_the_same_on_a_gpu(quantization: str, gpu: vulkan.Device, tmp_path: Path) -> None:
    checkpoint, plan, exact = write_llama(tmp_path / "checkpoint", SIZES), tmp_path / "plan.toml", tmp_path / "cpu.toml"
    plan.write_text(recipe_text("q4f16_1", TENSORS.items()), encoding="utf-8")
    exact.write_text(EXACT, encoding="utf-8")
    engines = [
        Engine(mlcpipe.compile(
            checkpoint, target=target, quantization=str(plan) if quantization == "plan" else quantization,
            kv_cache_dtype="f32", output=tmp_path / f"bundle{i}",
        ))
        for i, target in enumerate((str(exact), gpu.best_target()))
    ]  # fmt: skip
    expected = engines[0].logits(TOKENS)
    bound = 3e-5 * float(np.abs(expected).max())
    np.testing.assert_allclose(engines[1].logits(TOKENS), expected, rtol=0, atol=bound)
    steps = engines[1].logits_stepwise(TOKENS, prefill_tokens=12)
    np.testing.assert_allclose(steps, expected[11:], rtol=0, atol=bound)
