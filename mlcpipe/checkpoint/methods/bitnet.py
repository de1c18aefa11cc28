"""BitNet b1.58, as transformers packs it: `weight` uint8[N / 4, K], `weight_scale` [1].

Bits 2 i of row r are row r + i * N / 4, plus 1: -1, 0 and 1. The scale of the class bitlinear divides, that of
autobitlinear multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, matrix, scales_of, sibling
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    divides = settings.choice("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
    settings.choice("quantization_mode", ("offline",), "offline")
    settings.choice("use_rms_norm", (False,), False)
    settings.ignore("rms_norm_eps")
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        found[f"{module}.weight"] = _matrix(module, sibling(tensors, module, "weight"), tensors[name], divides)
        used |= {name, f"{module}.weight"}
    return found, used


def _matrix(module: str, codes: TensorInfo, scale: TensorInfo, divides: bool) -> Matrix:
    quarter, k = codes.shape if len(codes.shape) == 2 else (0, 0)
    check_tensor(codes, ("uint8",), (quarter, -(-k // 32) * 32))
    check_tensor(scale, FLOAT_DTYPES, (1,))

    def parts() -> Parts:
        packed = np.frombuffer(read_bytes(codes), np.uint8).reshape(quarter, k)
        steps = np.concatenate([packed >> np.uint8(2 * i) & np.uint8(3) for i in range(4)])
        if steps.max(initial=0) > 2:
            raise CheckpointError(f"tensor {shown(codes.name)} has a code 3", where=shown_path(codes.file),
                                  expected="0, 1 and 2")  # fmt: skip
        value = widened(scales_of(scale))
        with np.errstate(divide="ignore"):
            scales = np.repeat(1 / value if divides else value, 4 * quarter)
        return Parts(steps + np.uint8(1), scales.astype(np.float32)[:, None])

    return matrix(module, (4 * quarter, k), "int2_row_f32", (codes, scale), parts, 2)
