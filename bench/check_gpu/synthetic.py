"""Models without a checkpoint to download: small random ones on disk, and large ones whose weights are made on the device."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm_ffi import Shape

from mlcpipe.bundle import Manifest
from mlcpipe.devices.base import Device
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.models import build_model

COMMON: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}
# Three families that share few kernels: plain, with soft caps and windows, with experts.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "sliding_window": 32, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    "qwen3_moe": {
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
}  # fmt: skip
SMALL_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
# Llama 3 8B, and what a software device still runs.
LARGE: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "llama-3m": {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
    },
}  # fmt: skip
_SEED = 20260101
_BLOCK_BYTES = 1 << 24


def small_config(family: str) -> dict[str, Any]:
    """config.json of a small model."""
    return {**COMMON, **SMALL_SIZES, **SMALL[family], "model_type": family}


def large_config(name: str) -> dict[str, Any]:
    """config.json of a large model."""
    return {**COMMON, **LARGE[name], "model_type": "llama"}


def write_checkpoint(config: Mapping[str, Any], folder: Path, *, values: bool) -> Path:
    """config.json and float16 safetensors of a model; without `values` a sparse file that takes no space and has zeros.

    Matrices are normal with deviation 0.05, vectors near 1, so that logits and attention are not flat.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    shapes = {}
    for name, tensor in build_model(config).named_parameters():
        shape = [int(n) for n in tensor.shape]
        if ".experts_" in name:  # [experts, rows, columns]: one tensor for each expert and projection in a checkpoint
            prefix, projections = name.split("experts_")[0], ["down"] if "down" in name else ["gate", "up"]
            rows = shape[1] // len(projections)
            for expert, projection in itertools.product(range(shape[0]), projections):
                shapes[f"{prefix}experts.{expert}.{projection}_proj.weight"] = [rows, shape[2]]
        else:
            shapes[name] = shape
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    draw = np.random.default_rng(_SEED)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if not values:
            file.truncate(8 + len(raw) + offset)
            return folder
        for shape in shapes.values():
            scale, mean = (0.05, 0.0) if len(shape) > 1 else (0.1, 1.0)
            file.write((draw.standard_normal(shape, np.float32) * scale + mean).astype(np.float16).tobytes())
    return folder


def device_weights(manifest: Manifest, device: Device) -> dict[str, Any]:
    """Parameter name -> tensor on the device, where its numbers are made from one block.

    Codes are random bits; everything else is 0.01, a scale at which activations stay finite. Layouts store scales in
    float16 as words of two.
    """
    draw = np.random.default_rng(_SEED)
    weights = {}
    for info in manifest.params:
        dtype = np.dtype(info.dtype)
        count = min(int(np.prod(info.shape)), _BLOCK_BYTES // dtype.itemsize)
        block: NDArray[Any] = np.full(count, 0.01, dtype)
        if info.name.endswith("q_scale") and dtype == np.uint32:
            block = np.full(2 * count, 0.01, np.float16).view(dtype)
        elif dtype.kind in "iu":
            block = draw.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
        weights[info.name] = tensor = tvm_runtime.empty(info.shape, info.dtype, device.handle)
        _fill(tensor, block)
    return weights


def _fill(tensor: Any, block: NDArray[Any]) -> None:
    """Copy a block to the start of a tensor on a device, then what is there behind itself until it is full."""
    size, done = int(np.prod(tensor.shape)), len(block)
    tvm_runtime.copy(tvm_runtime.tensor(block), _part(tensor, 0, done))
    while done < size:
        count = min(done, size - done)
        tvm_runtime.copy(_part(tensor, 0, count), _part(tensor, done, count))
        done += count


def _part(tensor: Any, begin: int, count: int) -> Any:
    """Numbers of a tensor, flat."""
    nbytes = begin * np.dtype(str(tensor.dtype)).itemsize
    return tvm_runtime.function("runtime.TVMTensorCreateView")(tensor, Shape((count,)), tensor.dtype, nbytes)
