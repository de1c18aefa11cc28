"""Quantized safetensors compiled for a GPU in their own bits have the logits of transformers with dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe import Engine
from mlcpipe.bundle import read_manifest
from tests.gpu.conftest import Gpu
from tests.models import quantized, tiny

pytestmark = pytest.mark.usefixtures("kernels_are_valid")

TOKENS, PREFILL, CONTEXT = 20, 12, 64
FLOAT32 = 3e-5  # of the largest logit: sums in another order
# Zero points are subtracted from sums, not from codes: groups of 16 lose 2.3 times as much. With experts: 6e-5.
WIDER = {"nvfp4-experts": 1e-4}
# Columns in another order, experts, numbers of 4 bits; a table of the embedding, rows.
SOME = ("awq-experts",)
SELDOM = [
    pytest.param(name, marks=pytest.mark.everything) for name in ("gptq-sorted", "nvfp4", "mlx-8-tied", "compressed-8")
]


def _check(name: str, suited: str, folder: Path) -> None:
    """Chunks of a prompt, and decode steps."""
    model, target = quantized.write_case(name, folder), folder / "gpu.toml"
    target.write_text(f'base = "{suited}"\n[limits]\nmax_prefill_chunk = 8\n', encoding="utf-8")
    bundle = mlcpipe.compile(
        model.folder, target=str(target), kv_cache_dtype="f32", context_length=CONTEXT, output=folder / "bundle"
    )
    assert {p.scheme for p in read_manifest(bundle).params if p.name.endswith("q_weight")} == {model.scheme}
    tokens = tiny.prompt_tokens(model.case, TOKENS)
    engine, expected = Engine(bundle), model.logits(tokens)
    bound = WIDER.get(name, FLOAT32) * float(np.abs(expected).max())
    np.testing.assert_allclose(engine.logits(tokens), expected, rtol=0, atol=bound)
    steps = engine.logits_stepwise(tokens, prefill_tokens=PREFILL)
    np.testing.assert_allclose(steps, expected[PREFILL - 1 :], rtol=0, atol=bound)


@pytest.mark.parametrize("name", [*SOME, *SELDOM])
def test_kept_codes_have_the_logits_of_transformers(name: str, gpu: Gpu, tmp_path: Path) -> None:
    """By the target that suits the device: one that knows the size of its subgroups, where there is one."""
    _check(name, gpu.suited, tmp_path)


@pytest.mark.everything
@pytest.mark.parametrize("name", quantized.CASES)
def test_so_have_those_of_the_general_target(name: str, gpu: Gpu, tmp_path: Path) -> None:
    _check(name, gpu.plain, tmp_path)
