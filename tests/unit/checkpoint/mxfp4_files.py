"""Experts in MXFP4 as gpt-oss and mlx-lm have them, packed from the formats' descriptions."""

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


def write_mlx(folder: Path, **changed: Array | None) -> dict[str, Array]:
    """The same as mlx-lm has it: gate and up apart, eight codes in a word; one module has other bits.

    `changed` replaces tensors, by the end of their names, or drops them.
    """
    blocks, scales = random_stack(1, EXPERTS, 2 * WIDTH, HIDDEN)
    biases = numbers(EXPERTS, 2 * WIDTH).astype(ml_dtypes.bfloat16)
    stored: dict[str, Array | None] = {}
    for first, name in enumerate(("gate_proj", "up_proj")):
        rows = np.ascontiguousarray(blocks[:, first::2])
        stored[f"{name}.weight"] = rows.reshape(EXPERTS, WIDTH, HIDDEN // 2).view("<u4")
        stored[f"{name}.scales"], stored[f"{name}.bias"] = scales[:, first::2], biases[:, first::2]
    codes = np.random.default_rng(5).integers(0, 256, (EXPERTS, HIDDEN, WIDTH), np.uint8)
    steps, lowest = numbers(EXPERTS, HIDDEN, 1, seed=3), numbers(EXPERTS, HIDDEN, 1, seed=4)
    stored |= {"down_proj.weight": codes.view("<u4"), "down_proj.scales": steps, "down_proj.biases": lowest}
    kept = {f"{MODULE}.{name}": value for name, value in (stored | changed).items() if value is not None}
    write_tensors(folder / "model.safetensors", kept)
    other = {f"{MODULE}.down_proj": {"group_size": WIDTH, "bits": 8}}
    config = {"model_type": "gpt_oss", "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", **other}}
    (folder / "config.json").write_text(json.dumps(config))
    matrices = {f"{MODULE}.gate_up_proj": values(blocks, scales), f"{MODULE}.down_proj": codes * steps + lowest}
    return of_experts(matrices) | of_experts({f"{MODULE}.gate_up_proj_bias": biases.astype(np.float32)})


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
