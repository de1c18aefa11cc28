"""GGUF files compiled for a GPU in their own bits have the logits of the dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are made by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")
pytest.importorskip("gguf", reason="the files are written by the gguf package")

import mlcpipe
from mlcpipe import Engine
from tests.conftest import EXACT
from tests.gpu.conftest import Gpu
from tests.models import kept, tiny

pytestmark = pytest.mark.usefixtures("kernels_are_valid")

TOKENS, PREFILL, CONTEXT = 20, 12, 64
FLOAT32 = 3e-5  # of the largest logit: sums in another order
SOME = (
    ("mixtral", "Q4_K"),
    *(pytest.param(*case, marks=pytest.mark.everything) for case in (("qwen2", "Q6_K"), ("olmo2", "IQ1_S"))),
)


def _check(model_type: str, kind: str, suited: str, folder: Path) -> None:
    """Chunks of a prompt, and decode steps."""
    case, file = kept.kept_file(model_type, kind, folder)
    gpu, cpu = folder / "gpu.toml", folder / "cpu.toml"
    gpu.write_text(f'base = "{suited}"\n[limits]\nmax_prefill_chunk = 8\n', encoding="utf-8")
    cpu.write_text(EXACT, encoding="utf-8")
    engines = [
        Engine(mlcpipe.compile(
            file, target=str(target), quantization=quantization, kv_cache_dtype="f32", context_length=CONTEXT,
            output=folder / target.stem,
        ))
        for target, quantization in ((cpu, "q0f32"), (gpu, "keep"))
    ]  # fmt: skip
    tokens = tiny.prompt_tokens(case, TOKENS)
    expected = engines[0].logits(tokens)
    bound = FLOAT32 * float(np.abs(expected).max())
    np.testing.assert_allclose(engines[1].logits(tokens), expected, rtol=0, atol=bound)
    steps = engines[1].logits_stepwise(tokens, prefill_tokens=PREFILL)
    np.testing.assert_allclose(steps, expected[PREFILL - 1 :], rtol=0, atol=bound)


@pytest.mark.parametrize("model_type, kind", SOME)
def test_kept_weights_have_the_logits_of_dequantized_ones(model_type: str, kind: str, gpu: Gpu, tmp_path: Path) -> None:
    """By the target that suits the device: one that knows the size of its subgroups, where there is one."""
    _check(model_type, kind, gpu.suited, tmp_path)


@pytest.mark.everything
@pytest.mark.parametrize("model_type, kind", kept.CASES)
def test_so_have_those_of_the_general_target(model_type: str, kind: str, gpu: Gpu, tmp_path: Path) -> None:
    _check(model_type, kind, gpu.plain, tmp_path)
