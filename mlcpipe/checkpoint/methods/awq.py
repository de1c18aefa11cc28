"""AWQ, as AutoAWQ and AutoRound write it in the order of its GEMM kernels: 4 bits, groups of columns.

A matrix [N, K] is stored transposed: `qweight` int32[K, N / 8] has the codes of rows 8 i + 0 2 4 6 1 3 5 7 in its
nibbles, the lowest first, `qzeros` int32[groups, N / 8] alike, `scales` [groups, N]. A number is
(code - zero point) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.matrix import (
    Matrix,
    check_tensor,
    matrix,
    scales_of,
    scheme_name,
    sibling,
    stored_scales,
    words_of,
)
from mlcpipe.checkpoint.methods.gptq import group_of
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    settings.choice("method", ("awq",), "awq")
    settings.alike(("version", "format", "checkpoint_format"), ("gemm",), "gemm")
    if settings.take("backend") == "llm-awq":
        raise settings.refused("backend", "another one: its codes lie in another order", "llm-awq")
    settings.alike(("bits", "w_bit"), (4,))
    settings.choice("zero_point", (True, False), True)
    settings.choice("pack_dtype", ("int32",), "int32")
    group_size, varied = group_of(settings)
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        found[f"{module}.weight"] = _matrix(tensors, module, None if varied else group_size)
        used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
    return found, used


def _matrix(tensors: Mapping[str, TensorInfo], module: str, group_size: int | None) -> Matrix:
    codes, zeros, scales = sources = tuple(sibling(tensors, module, part) for part in ("qweight", "qzeros", "scales"))
    k, width = codes.shape if len(codes.shape) == 2 else (0, 0)
    groups = scales.shape[0] if scales.shape else 0
    check_tensor(codes, ("int32",), (k, width))
    check_tensor(zeros, ("int32",), (groups, width))
    check_tensor(scales, ("float16", "bfloat16", "float32"), (groups, 8 * width))
    scheme = scheme_name("uint", 4, k, groups, scales)
    if group_size is not None and k != groups * (k if group_size < 1 else group_size):
        raise CheckpointError(
            f"the shapes of {shown(module)} contradict config.json", where=shown_path(codes.file),
            expected=f"groups of {group_size}", found=f"{k} columns in {groups} groups",
        )  # fmt: skip
    return matrix(module, (8 * width, k), scheme, sources, partial(_parts, codes, zeros, scales, scheme))


def _parts(codes: TensorInfo, zeros: TensorInfo, scales: TensorInfo, scheme: str) -> Parts:
    points = _nibbles(words_of(zeros)).view(np.int8)
    return Parts(_nibbles(words_of(codes)), stored_scales(scales_of(scales).T, scheme), points)


def _nibbles(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Words [x, N / 8] -> codes uint8[N, x]."""
    codes = np.empty((words.shape[1], 8, words.shape[0]), np.uint8)
    for i, row in enumerate(ORDER):
        codes[:, row] = (words.T >> np.uint32(4 * i)) & np.uint32(15)
    return codes.reshape(-1, words.shape[0])
