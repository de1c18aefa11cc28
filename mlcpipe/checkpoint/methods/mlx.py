"""MLX, as mlx-lm writes it: `quantization` in config.json, with the bits and groups of single modules by their paths.

A matrix [N, K]: `weight` uint32[N, K * bits / 32] is a stream of bits along K. In mode affine `scales` and `biases`
[N, groups] make scale * code + bias. Modes mxfp4 and nvfp4 have numbers of 4 bits and scales of a byte (OCP
Microscaling Formats 1.0) in groups of 32 and 16, which `biases` do not follow. Mode mxfp8 has e4m3, see `fp8.py`, with
a scale e8m0 for 32. Tensors of experts have one more axis before, see `expert_stacks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from mlcpipe.checkpoint.expert_stacks import alike, check_number
from mlcpipe.checkpoint.matrix import (
    Matrix,
    byte_scales,
    check_tensor,
    fp8_matrix,
    matrix,
    scales_of,
    scheme_name,
    sibling,
    stored_scales,
    words_of,
)
from mlcpipe.checkpoint.methods.bit_stream import unpack_stream
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
FLOATS = {"mxfp4": ("MXFP4", 4, 32), "nvfp4": ("NVFP4", 4, 16), "mxfp8": ("Q8_0", 8, 32)}  # scheme, bits, group


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    usual, overrides = _form(settings), settings.overrides()
    settings.ignore("quant_method")
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        override = overrides.pop(module, True)
        if override is False:
            raise settings.refused(module, "the bits and the group size of its scales", override)
        bits, group_size, mode = usual if override is True else _form(override)
        names = ("weight", "scales", "biases")[: 3 if mode == "affine" else 2]
        stored = {part: sibling(tensors, module, part) for part in names}
        modules = alike(module, stored) if len(stored["scales"].shape) == 3 else [(module, stored)]
        for one, parts in modules:
            found[f"{one}.weight"] = _matrix(one, parts, bits, group_size, mode)
        check_number(len(found), stored["weight"])
        used |= {tensor.name for tensor in stored.values()}
    for module, override in overrides.items():
        if override is not False:
            raise settings.refused(module, "a module with scales", "one without")
    return found, used


def _form(settings: QuantizationConfig) -> tuple[int, int, str]:
    """Bits, columns of a group and mode."""
    mode = settings.choice("mode", ("affine", *FLOATS), "affine")
    if mode == "affine":
        return settings.choice("bits", BITS), settings.choice("group_size", GROUPS), mode
    _, bits, group_size = FLOATS[mode]
    return settings.choice("bits", (bits,)), settings.choice("group_size", (group_size,)), mode


def _matrix(module: str, tensors: Mapping[str, TensorInfo], bits: int, group_size: int, mode: str) -> Matrix:
    codes, scales = tensors["weight"], tensors["scales"]
    n, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
    k = groups * group_size
    check_tensor(codes, ("uint32",), (n, k * bits // 32))
    if mode != "affine":
        check_tensor(scales, ("uint8",), (n, groups))
        if mode == "mxfp8":
            return fp8_matrix(module, codes, scales, (1, group_size))
        scheme = FLOATS[mode][0]
        return matrix(module, (n, k), scheme, (codes, scales), partial(_float_parts, codes, scales, scheme))
    biases = tensors["biases"]
    check_tensor(scales, ("float16", "bfloat16", "float32"), (n, groups))
    check_tensor(biases, (scales.dtype,), (n, groups))
    scheme = scheme_name("affine", bits, k, groups, scales)
    read = partial(_parts, codes, scales, biases, bits, scheme)
    return matrix(module, (n, k), scheme, (codes, scales, biases), read)


def _parts(codes: TensorInfo, scales: TensorInfo, biases: TensorInfo, bits: int, scheme: str) -> Parts:
    both = np.stack([scales_of(scales), scales_of(biases)], axis=-1).reshape(len(scales_of(scales)), -1)
    return Parts(unpack_stream(words_of(codes), bits, codes.shape[1] * 32 // bits), stored_scales(both, scheme))


def _float_parts(codes: TensorInfo, scales: TensorInfo, scheme: str) -> Parts:
    return Parts(unpack_stream(words_of(codes), 4, codes.shape[1] * 8), byte_scales(scales, scheme))
