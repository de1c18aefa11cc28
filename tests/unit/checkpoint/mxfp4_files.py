"""Experts in MXFP4 as gpt-oss has them, packed from the format's description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.unit.checkpoint.helpers import numbers, write_tensors

Array = NDArray[Any]

EXPERTS, HIDDEN, WIDTH = 3, 64, 32
MODULE = "model.layers.0.mlp.experts"
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def random_stack(seed: int, experts: int, rows: int, columns: int) -> tuple[Array, Array]:
    """Codes uint8[experts, rows, columns / 32, 16] and exponents uint8[experts, rows, columns / 32]."""
    draw = np.random.default_rng(seed)
    blocks = draw.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
    return blocks, draw.integers(121, 125, (experts, rows, columns // 32)).astype(np.uint8)


def values(blocks: Array, scales: Array) -> Array:
    """The numbers float32[experts, rows, columns]."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    numbers_ = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.exp2(scales[..., None] - np.float32(127))
    return numbers_.reshape(*blocks.shape[:2], -1)


def write(folder: Path, fields: dict[str, Any] | None = None, **changed: Array | None) -> dict[str, Array]:
    """A checkpoint with the experts of one layer -> float32 of their matrices and biases.

    `changed` replaces tensors, by the end of their names, or drops them.
    """
    gate_up, down = random_stack(1, EXPERTS, 2 * WIDTH, HIDDEN), random_stack(2, EXPERTS, HIDDEN, WIDTH)
    biases = {"gate_up_proj_bias": numbers(EXPERTS, 2 * WIDTH), "down_proj_bias": numbers(EXPERTS, HIDDEN, seed=1)}
    biases = {name: value.astype(ml_dtypes.bfloat16) for name, value in biases.items()}
    stored: dict[str, Array | None] = {"gate_up_proj_blocks": gate_up[0], "gate_up_proj_scales": gate_up[1],
                                       "down_proj_blocks": down[0], "down_proj_scales": down[1], **biases}  # fmt: skip
    kept = {f"{MODULE}.{name}": value for name, value in (stored | changed).items() if value is not None}
    write_tensors(folder / "model.safetensors", {**kept, "model.norm.weight": numbers(HIDDEN)})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN, **(fields or {})}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "quantization_config": config}))
    matrices = {"gate_up_proj": values(*gate_up), "down_proj": values(*down)}
    return of_experts({f"{MODULE}.{name}": value for name, value in matrices.items()}) | of_experts(
        {f"{MODULE}.{name}": value.astype(np.float32) for name, value in biases.items()}
    )


def of_experts(stacks: dict[str, Array]) -> dict[str, Array]:
    """Of stacks [experts, rows, ...] by name, the tensors of each expert."""
    found = {}
    for name, stack in stacks.items():
        module, part = name.rsplit(".", 1)
        kind = "bias" if part.endswith("_bias") else "weight"
        for expert, rows in enumerate(stack):
            if part.startswith("down"):
                found[f"{module}.{expert}.down_proj.{kind}"] = rows
            else:
                found[f"{module}.{expert}.gate_proj.{kind}"] = rows[0::2]
                found[f"{module}.{expert}.up_proj.{kind}"] = rows[1::2]
    return found
