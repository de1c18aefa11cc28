"""Matrices of bitsandbytes in 4 bits, packed from the format's description."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.unit.checkpoint.helpers import write_tensors
from tests.unit.checkpoint.quantized_files import K, N

NAME = "m.q_proj.weight"
# QLoRA (Dettmers et al. 2023), appendix E; of FP4 the values that bitsandbytes documents.
NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
FP4 = (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25, 0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25)
MAPS = {"nf4": (NF4, 124), "fp4": (FP4, 120)}


def four_bits(kind: str, nested: bool, **state: Any) -> tuple[dict[str, NDArray[Any]], NDArray[Any], NDArray[Any]]:
    """The tensors of a matrix, its codes u8[N, K] and the largest magnitudes float32[N, K / 64]."""
    draw = np.random.default_rng(5)
    codes = draw.integers(0, 16, (N, K), np.uint8)
    flat = codes.reshape(-1)
    levels = np.array(MAPS[kind][0], np.float32)
    fields: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [N, K]}
    tensors: dict[str, NDArray[Any]] = {NAME: (flat[::2] << 4 | flat[1::2])[:, None], f"{NAME}.quant_map": levels}
    blocks = N * K // 64
    if nested:
        second, scales = np.linspace(-1, 1, 256, dtype=np.float32), draw.uniform(0.01, 0.02, -(-blocks // 256))
        absmax = draw.integers(0, 256, blocks, np.uint8)
        fields |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
        tensors[f"{NAME}.nested_quant_map"] = second
        tensors[f"{NAME}.nested_absmax"] = scales.astype(np.float32)
        values = second[absmax] * np.repeat(scales.astype(np.float32), 256)[:blocks] + np.float32(0.05)
    else:
        values = absmax = draw.uniform(0.01, 0.2, blocks).astype(np.float32)
    tensors[f"{NAME}.absmax"] = absmax
    text = np.frombuffer(json.dumps(fields | state).encode(), np.uint8)
    tensors[f"{NAME}.quant_state.bitsandbytes__{kind}"] = text
    return tensors, codes, values.reshape(N, -1)


def write(folder: Path, tensors: Mapping[str, Any], **fields: Any) -> None:
    """A checkpoint with these tensors."""
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"} | fields
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": method}))
    write_tensors(folder / "model.safetensors", tensors)
