"""Draft heads of random numbers, in the files that their authors write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[Any]]
HEADS = 3


def random_heads(vocab: int, hidden: int = 64, blocks: int = 1) -> Tensors:
    """Of `HEADS` heads."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (hidden, hidden), f"{head}.{block}.linear.bias": (hidden,)}
        shapes[f"{head}.{blocks}.weight"] = vocab, hidden
    return {name: rng.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}


def write_heads(folder: Path, tensors: Tensors) -> Path:
    """The folder, with heads in it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


# Of an EAGLE-3 head for a model with three layers, whose inputs it reads.
EAGLE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


def random_eagle(vocab: int, config: Mapping[str, Any] = EAGLE, target_hidden: int = 64) -> Tensors:
    """Of the sizes in `config`; where that has a `draft_vocab_size`, every second token is guessed, as many as it says."""
    rng = np.random.default_rng(1)
    h, width, heads, kv_heads = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim, guessed = config.get("head_dim") or h // heads, config.get("draft_vocab_size", vocab)
    shapes = {
        "fc.weight": (h, 3 * target_hidden),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, heads * dim),
        "midlayer.mlp.gate_proj.weight": (width, h),
        "midlayer.mlp.up_proj.weight": (width, h),
        "midlayer.mlp.down_proj.weight": (h, width),
        "lm_head.weight": (guessed, h),
    }
    tensors = {name: rng.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = rng.normal(1, 0.2, (h,)).astype(np.float32)
    if guessed < vocab:
        targets = 2 * np.arange(guessed)
        tensors["d2t"] = targets - np.arange(guessed)
        tensors["t2d"] = np.isin(np.arange(vocab), targets)
    return tensors


def write_eagle(folder: Path, tensors: Tensors, config: Mapping[str, Any] = EAGLE) -> Path:
    """The folder, with a head in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
