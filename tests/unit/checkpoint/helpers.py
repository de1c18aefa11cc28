"""Builds safetensors files byte by byte, so that each rule of the format can be broken alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "bfloat16": "BF16", "int64": "I64", "float64": "F64",
         "int32": "I32", "uint32": "U32", "int8": "I8", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}  # fmt: skip
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_raw(path: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with exactly these parts; `length` overrides the header's length field."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    return write_raw(path, json.dumps(header).encode(), data)


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]]) -> Path:
    """A valid file; uint16 arrays are stored as the bits of bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return write_header(path, header, data)


def write_checkpoint(folder: Path, shards: Mapping[str, Mapping[str, NDArray[Any]]]) -> Path:
    """A checkpoint folder: `model.safetensors` alone, or shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for name, tensors in shards.items():
        write_tensors(folder / name, tensors)
    if list(shards) != ["model.safetensors"]:
        write_index(folder, {tensor: name for name, tensors in shards.items() for tensor in tensors})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def numbers(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
