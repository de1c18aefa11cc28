"""Small models as quantized safetensors checkpoints, and the logits of transformers with their dequantized weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import save_file

from tests.models import tiny
from tests.unit.checkpoint.quantized_files import BFLOAT16, Form, quantize

SEED = 3
# family, method, form, the scheme that keeps it
CASES = {
    "gptq-4": ("llama", "gptq", Form(4, 128), "uint4_g128_f16"),
    "gptq-v2-3": ("qwen2", "gptq", Form(3, 64, fields={"checkpoint_format": "gptq_v2"}), "uint3_g64_f16"),
    "gptq-middle": ("qwen3", "gptq", Form(4, 32, "middle", fields={"sym": True}), "int4_g32_f16"),
    "gptq-8-row": ("llama", "gptq", Form(8, 0, "middle"), "int8_row_f32"),
    "gptq-2-bfloat16": ("llama", "gptq", Form(2, 32, dtype=BFLOAT16), "uint2_g32_bf16"),
    "gptq-sorted": ("qwen2", "gptq", Form(4, 64, fields={"desc_act": True}), "uint4_g64_f16"),
    "gptq-sorted-experts": ("mixtral", "gptq", Form(4, 64, fields={"desc_act": True}), "uint4_g64_f16"),
    "awq": ("qwen2", "awq", Form(4, 128), "uint4_g128_f16"),
    "awq-experts": ("mixtral", "awq", Form(4, 64), "uint4_g64_f16"),
    "mlx-4": ("llama", "mlx", Form(4, 64, "biases", BFLOAT16), "affine4_g64_bf16"),
    "mlx-8-tied": ("gemma2", "mlx", Form(8, 64, "biases", BFLOAT16), "affine8_g64_bf16"),
    "mlx-experts": ("mixtral", "mlx", Form(4, 64, "biases", BFLOAT16), "affine4_g64_bf16"),
    "mlx-5-experts": ("qwen3_moe", "mlx", Form(5, 32, "biases"), "affine5_g32_f16"),
    "compressed-4": ("llama", "compressed-tensors", Form(4, 64, "middle", BFLOAT16), "int4_g64_bf16"),
    "compressed-sorted": ("llama", "compressed-tensors", Form(4, 32, fields={"actorder": "group"}), "uint4_g32_f16"),
    "compressed-8": ("qwen2", "int-quantized", Form(8, 0, "middle", BFLOAT16), "int8_row_f32"),
    "nvfp4": ("qwen3", "nvfp4", Form(4, 16, "floats"), "fp4_g16_f32"),
    "nvfp4-experts": ("mixtral", "nvfp4", Form(4, 16, "floats"), "fp4_g16_f32"),
    "mlx-3": ("qwen2", "mlx", Form(3, 32, "biases"), "affine3_g32_f16"),
}
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
_HEADS = {name: {"head_dim": 64} for name in ("llama", "qwen3", "mixtral", "gemma2")}
_HEADS["qwen3_moe"] = {"head_dim": 64, "moe_intermediate_size": 128}


@dataclass(frozen=True)
class Quantized:
    """A checkpoint in `folder`, and its numbers by tensor; `scheme` keeps its matrices."""

    case: tiny.TinyCase
    source: Path
    folder: Path
    values: dict[str, Any]
    scheme: str

    def logits(self, tokens: list[int]) -> Any:
        """Logits f32[tokens, vocabulary] of transformers with these numbers, which take the place of the source's."""
        save_file(self.values, self.source / "model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            self.source, attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def write_case(name: str, folder: Path) -> Quantized:
    """One of `CASES` as a checkpoint in a folder."""
    family, method, form, scheme = CASES[name]
    case = tiny.TinyCase(family, "default", {**_WIDE, **_HEADS.get(family, {})})
    source = tiny.write_tiny(case, folder / "source", seed=SEED)
    values = quantize(source, folder / "quantized", method, form)
    return Quantized(case, source, folder / "quantized", values, scheme)
