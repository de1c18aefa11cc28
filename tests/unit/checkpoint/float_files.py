"""Checkpoints of one matrix `m.q_proj` in MXFP8 and with two of four numbers, packed from the formats' descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.unit.checkpoint.helpers import numbers, write_tensors
from tests.unit.checkpoint.quantized_files import K, N

Array = NDArray[Any]


def write_fields(folder: Path, tensors: dict[str, Array], fields: dict[str, Any]) -> None:
    """A checkpoint with these tensors and this quantization in config.json."""
    config = {"model_type": "llama", "quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder / "model.safetensors", tensors)


def write_mxfp8(folder: Path, mlx: bool = True, group: int = 32) -> Array:
    """Numbers e4m3 with scales e8m0, as MLX or compressed-tensors have them -> float32[N, K]."""
    weight = (numbers(N, K) * 100).astype(ml_dtypes.float8_e4m3fn)
    exponents = np.random.default_rng(4).integers(117, 124, (N, K // 32)).astype(np.uint8)
    if mlx:
        tensors = {"m.q_proj.weight": weight.view("<u4"), "m.q_proj.scales": exponents}
        write_fields(folder, tensors, {})
        config = {"model_type": "llama", "quantization": {"mode": "mxfp8", "bits": 8, "group_size": group}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    else:
        form = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": group, "scale_dtype": "torch.uint8"}
        fields = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": form}}}  # fmt: skip
        write_fields(folder, {"m.q_proj.weight": weight, "m.q_proj.weight_scale": exponents}, fields)
    scales = np.exp2(exponents.astype(np.float32) - 127)
    return weight.astype(np.float32) * np.repeat(scales, 32, 1)


def sparse_tensors(dense: Array) -> dict[str, Array]:
    """The tensors of dense [N, K], of which the two larger of each four columns are stored."""
    fours = np.abs(dense.astype(np.float32)).reshape(-1, 4)
    mask = (np.argsort(np.argsort(-fours, axis=1, kind="stable"), axis=1) < 2).reshape(dense.shape)
    return {
        "m.q_proj.compressed": dense[mask].reshape(len(dense), -1),
        "m.q_proj.bitmask": np.packbits(mask, axis=1, bitorder="little"),
        "m.q_proj.shape": np.array(dense.shape, np.int64)[:, None],
    }


SPARSE_FIELDS = {
    "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "config_groups": {},
    "sparsity_config": {"format": "sparse-24-bitmask", "global_sparsity": 0.5, "sparsity_structure": "2:4",
                        "targets": ["Linear"], "ignore": ["lm_head"], "registry_requires_subclass": False},
}  # fmt: skip


def write_sparse(folder: Path, dtype: Any = ml_dtypes.bfloat16, **changed: Any) -> Array:
    """A matrix with two of four numbers -> float32[N, K]; `changed` replaces tensors, by the end of their names."""
    dense = numbers(N, K).astype(dtype)
    dense[3, :8] = 0
    stored = sparse_tensors(dense) | {f"m.q_proj.{part}": value for part, value in changed.items()}
    write_fields(folder, {**stored, "m.norm.weight": numbers(K)}, SPARSE_FIELDS)
    fours = np.argsort(-np.abs(dense.astype(np.float32)).reshape(-1, 4), axis=1, kind="stable")
    expected = dense.astype(np.float32).reshape(-1, 4).copy()
    np.put_along_axis(expected, fours[:, 2:], 0, axis=1)
    return expected.reshape(N, K)
