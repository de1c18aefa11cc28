"""Quantized safetensors checkpoints keep their codes, and have the logits of transformers with dequantized weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import open_checkpoint
from tests.conftest import exact_target
from tests.models import quantized, tiny


@pytest.mark.fast_cases("gptq-4")
@pytest.mark.full_cases(
    "gptq-v2-3", "gptq-sorted-experts", "awq-experts", "mlx-8-tied", "mlx-5-experts", "compressed-sorted",
    "nvfp4-experts",
)  # fmt: skip
@pytest.mark.parametrize("name", quantized.CASES)
def test_kept_codes_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Activations in float32: sums of the same products in another order."""
    model = quantized.write_case(name, tmp_path)
    found = open_checkpoint(model.folder)
    assert found.quantization(None) == "keep"
    for tensor, expected in model.values.items():
        np.testing.assert_array_equal(found.read(tensor), expected, err_msg=tensor)
    bundle = tmp_path / "bundle"
    mlcpipe.compile(model.folder, target=exact_target(tmp_path), kv_cache_dtype="f32", output=bundle)
    tokens = tiny.prompt_tokens(model.case, 20)
    logits, expected = mlcpipe.Engine(bundle).logits(tokens), model.logits(tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
    kept = read_manifest(bundle)
    matrices = {param.scheme for param in kept.params if param.name.endswith("q_weight")}
    assert kept.quantization == "keep" and matrices == {model.scheme}
    assert any(param.name.endswith("q_columns") for param in kept.params) == ("sorted" in name)
