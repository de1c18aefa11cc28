"""An adapter of two projections, as PEFT saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODULES = {"model.layers.0.self_attn.q_proj": (32, 16), "model.layers.1.mlp.up_proj": (48, 16)}
PREFIX = "base_model.model."
Tensors = dict[str, np.ndarray]


def config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/base", **changes}


def tensors(rank: int = 4) -> Tensors:
    rng = np.random.default_rng(0)
    made = {}
    for name, (n, k) in MODULES.items():
        made[f"{PREFIX}{name}.lora_A.weight"] = rng.standard_normal((rank, k)).astype(np.float32)
        made[f"{PREFIX}{name}.lora_B.weight"] = rng.standard_normal((n, rank)).astype(np.float32)
    return made


def write(folder: Path, fields: dict[str, Any], arrays: Tensors) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(arrays, folder / "adapter_model.safetensors")
    return folder
