"""LoRA adapters of random numbers, in PEFT's files, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj",
               "query_key_value", "dense_h_to_4h")  # fmt: skip
Pairs = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def config(rank: int, **changes: Any) -> dict[str, Any]:
    """What PEFT writes for an adapter of this rank, with other fields where `changes` says so."""
    return {
        "alpha_pattern": {}, "base_model_name_or_path": "tiny", "bias": "none", "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "lora_alpha": 2 * rank, "lora_dropout": 0.05,
        "modules_to_save": None, "peft_type": "LORA", "r": rank, "rank_pattern": {}, "task_type": "CAUSAL_LM",
        "target_modules": list(PROJECTIONS), "use_dora": False, "use_rslora": False, **changes,
    }  # fmt: skip


def random_pairs(model: Any, rank: int, seed: int, projections: tuple[str, ...] = PROJECTIONS) -> Pairs:
    """A [rank, k] and B [n, rank] by module, for the linear layers with these names."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name and name.split(".")[-1] in projections:
            n, k = module.weight.shape
            a, b = (rng.standard_normal(shape).astype(np.float32) * 0.1 for shape in ((rank, k), (n, rank)))
            pairs[name] = a, b
    return pairs


def write_adapter(folder: Path, pairs: Pairs, fields: Mapping[str, Any]) -> Path:
    """The folder, with an adapter in PEFT's files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": array
        for name, pair in pairs.items()
        for letter, array in zip("AB", pair)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merge(model: Any, pairs: Pairs, scales: Mapping[str, float] | float) -> Any:
    """The model with W + scale B A in the place of each W, which is what an adapter means."""
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            scale = scales if isinstance(scales, float) else scales[name]
            modules[name].weight += torch.from_numpy(scale * (b.astype(np.float64) @ a)).float()
    return model
