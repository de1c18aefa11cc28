"""A model whose kernels came through naga, and one whose kernels this writer made of the same schedules: the same numbers.

GEMV and GEMM of int4, attention of a prompt in chunks and of single tokens, norms, ropes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine
from tests.conftest import TinyLlama, write_llama
from tests.spirv import naga

pytestmark = [
    pytest.mark.everything,  # Mesa takes minutes to compile these kernels
    pytest.mark.skipif(bool(naga.missing()), reason=naga.missing() or "runs"),
]

# No subgroups: WGSL has none for this kind of target. Small tiles: Mesa's CPU takes minutes to compile a kernel that keeps
# much across a barrier.
TARGET = """
description = "kernels for WebGPU, by way of Vulkan"
base = "webgpu"
backend = "vulkan"
kv_cache = "pages"
companions = []
[tvm]
kind = "vulkan"
[tvm.host]
kind = "llvm"
mtriple = ""
[limits]
max_prefill_chunk = 8
[schedule]
gemv_rows = 1
gemm_blocks = 2
gemm_small_blocks = 2
gemv_sums = 32
"""
CLOSE = 1e-5  # of the largest logit: sines and exponentials are others, and sums may be fused with products


def test_a_model_has_the_numbers_of_naga(device: None, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(layers=1))
    target = tmp_path / "target.toml"
    target.write_text(TARGET, encoding="utf-8")
    options = {"quantization": "q4f32_1", "context_length": 128, "kv_cache_dtype": "f32"}
    ours = Engine(mlcpipe.compile(checkpoint, target=str(target), output=tmp_path / "ours", **options))
    theirs = Engine(naga.compiled(checkpoint, target, "q4f32_1", tmp_path / "theirs"))
    tokens = [int(token) for token in np.random.default_rng(3).integers(0, 256, 16)]
    expected = theirs.logits(tokens)
    bound = CLOSE * float(np.abs(expected).max())
    np.testing.assert_allclose(ours.logits(tokens), expected, rtol=0, atol=bound)
    steps = theirs.logits_stepwise(tokens, prefill_tokens=11)
    np.testing.assert_allclose(ours.logits_stepwise(tokens, prefill_tokens=11), steps, rtol=0, atol=bound)
