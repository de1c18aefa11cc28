"""Quantized safetensors checkpoints keep their codes, and have the logits of transformers with dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import open_checkpoint
from tests.conftest import exact_target
from tests.models import tiny
from tests.unit.checkpoint.quantized_files import BFLOAT16, Form, quantize

SEED = 3
CASES = {
    "gptq-4": ("llama", "gptq", Form(4, 128), "uint4_g128_f16"),
    "gptq-v2-3": ("qwen2", "gptq", Form(3, 64, fields={"checkpoint_format": "gptq_v2"}), "uint3_g64_f16"),
    "gptq-middle": ("qwen3", "gptq", Form(4, 32, "middle", fields={"sym": True}), "int4_g32_f16"),
    "gptq-8-row": ("llama", "gptq", Form(8, 0, "middle"), "int8_row_f32"),
    "gptq-2-bfloat16": ("llama", "gptq", Form(2, 32, dtype=BFLOAT16), "uint2_g32_bf16"),
    "gptq-sorted": ("qwen2", "gptq", Form(4, 64, fields={"desc_act": True}), "uint4_g64_f16"),
    "awq": ("qwen2", "awq", Form(4, 128), "uint4_g128_f16"),
    "awq-experts": ("mixtral", "awq", Form(4, 64), "uint4_g64_f16"),
    "mlx-4": ("llama", "mlx", Form(4, 64, "biases", BFLOAT16), "affine4_g64_bf16"),
    "mlx-8-tied": ("gemma2", "mlx", Form(8, 64, "biases", BFLOAT16), "affine8_g64_bf16"),
    "compressed-4": ("llama", "compressed-tensors", Form(4, 64, "middle", BFLOAT16), "int4_g64_bf16"),
    "compressed-8": ("qwen2", "int-quantized", Form(8, 0, "middle", BFLOAT16), "int8_row_f32"),
    "nvfp4": ("qwen3", "nvfp4", Form(4, 16, "floats"), "fp4_g16_f32"),
    "nvfp4-experts": ("mixtral", "nvfp4", Form(4, 16, "floats"), "fp4_g16_f32"),
    "mlx-3": ("qwen2", "mlx", Form(3, 32, "biases"), "affine3_g32_f16"),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512}
HEADS = {name: {"head_dim": 64} for name in ("llama", "qwen3", "mixtral", "gemma2")}


@pytest.mark.fast_cases("gptq-4")
@pytest.mark.parametrize("name", CASES)
def test_kept_codes_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Activations in float32: sums of the same products in another order."""
    family, method, form, scheme = CASES[name]
    case = tiny.TinyCase(family, "default", {**WIDE, **HEADS.get(family, {})})
    source = tiny.write_tiny(case, tmp_path / "source", seed=SEED)
    folder = tmp_path / "quantized"
    values = quantize(source, folder, method, form)
    found = open_checkpoint(folder)
    assert found.quantization(None) == "keep"
    for tensor, expected in values.items():
        np.testing.assert_array_equal(found.read(tensor), expected, err_msg=tensor)
    bundle = tmp_path / "bundle"
    mlcpipe.compile(folder, target=exact_target(tmp_path), kv_cache_dtype="f32", output=bundle)
    tokens = tiny.prompt_tokens(case, 20)
    logits = mlcpipe.Engine(bundle).logits(tokens)
    expected = reference(source, values, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
    kept = read_manifest(bundle)
    matrices = {param.scheme for param in kept.params if param.name.endswith("q_weight")}
    assert kept.quantization == "keep" and matrices == {scheme}


def reference(source: Path, values: dict[str, Any], tokens: list[int]) -> Any:
    """Logits f32[tokens, vocabulary] of transformers with these weights."""
    from safetensors.numpy import save_file

    save_file(values, source / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
