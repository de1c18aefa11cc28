"""GPTQ, as AutoGPTQ, GPTQModel and AutoRound write it: a matrix [N, K] in groups of columns.

`qweight` int32[K * bits / 32, N] is a stream of bits along K, `qzeros` int32[groups, N * bits / 32] one along N,
`scales` [groups, N]. A number is (code - zero point) * scale. Version 1 stores zero points less 1, modulo 2**bits;
version 2 stores them unchanged. `g_idx` int32[K] is the group of each column (`desc_act`). Bits and groups of single
modules (`dynamic`) follow from their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    sorted_columns,
    stored_scales,
    words_of,
)
from mlcpipe.checkpoint.methods.bit_stream import unpack_stream
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

BITS = (2, 3, 4, 8)
# Fields that the tensors show too, or that choose a kernel.
SHOWN = ("act_data_type", "act_dynamic", "act_group_size", "act_sym", "backend", "desc_act", "lm_head", "sym")
VERSIONS = ("gptq", "gptq_v2")


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    settings.choice("method", ("gptq",), "gptq")
    version = settings.alike(("checkpoint_format", "format"), VERSIONS, "gptq")
    return matrices_of(version, settings, tensors)


def matrices_of(
    version: str, settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]
) -> tuple[dict[str, Matrix], set[str]]:
    """As `matrices`, of one of VERSIONS."""
    bits = settings.alike(("bits", "w_bit", "wbits"), BITS)
    group_size, varied = group_of(settings)
    settings.choice("pack_dtype", ("int32",), "int32")
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        layer = _Layer.of(tensors, module, version == "gptq")
        if not varied and (layer.bits, layer.group_size) != (bits, layer.k if group_size < 1 else group_size):
            raise CheckpointError(
                f"the shapes of {shown(module)} contradict config.json", where=shown_path(layer.codes.file),
                expected=f"{bits} bits in groups of {group_size}",
                found=f"{layer.bits} bits in groups of {layer.group_size}",
            )  # fmt: skip
        found[f"{module}.weight"] = layer.matrix(module)
        used |= {f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
    return found, used


def group_of(settings: QuantizationConfig) -> tuple[int, bool]:
    """Columns of a group, or -1 for a row, and whether single modules have their own, which their shapes show.

    Raises ConfigError for other settings that change the result: codes that are no integers, rounded activations.
    """
    old = settings.take("q_group_size", settings.take("groupsize"))
    size = settings.integer("group_size", -1, 1 << 16, old)
    settings.choice("data_type", ("int",), "int")
    settings.integer("act_bits", 16, 64, 16)
    settings.ignore(*SHOWN)
    of_modules = [settings.take(field) for field in ("dynamic", "extra_config", "regex_config")]
    return size, any(of_modules)


@dataclass(frozen=True)
class _Layer:
    """The stored tensors of a matrix [n, k], with shapes that fit each other."""

    codes: TensorInfo
    zeros: TensorInfo
    scales: TensorInfo
    bits: int
    n: int
    k: int
    one_more: bool
    columns: NDArray[np.int32] | None = None

    @property
    def group_size(self) -> int:
        return self.k // max(1, self.scales.shape[0])

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], module: str, one_more: bool) -> _Layer:
        """The layer `module`. Raises CheckpointError for tensors that are missing or do not fit."""
        codes, zeros, scales = (sibling(tensors, module, part) for part in ("qweight", "qzeros", "scales"))
        rows, n = codes.shape if len(codes.shape) == 2 else (0, 0)
        groups, width = zeros.shape if len(zeros.shape) == 2 else (0, 0)
        bits = 32 * width // n if n else 0
        if bits not in BITS or rows * 32 % bits:
            check_tensor(codes, ("int32",), (rows, n))
            raise CheckpointError(
                f"the codes of {shown(module)} do not fit their zero points", where=shown_path(codes.file),
                expected="2, 3, 4 or 8 bits", found=f"{list(codes.shape)} and {list(zeros.shape)}",
            )  # fmt: skip
        layer = cls(codes, zeros, scales, bits, n, rows * 32 // bits, one_more)
        check_tensor(codes, ("int32",), (rows, n))
        check_tensor(zeros, ("int32",), (groups, n * bits // 32))
        check_tensor(scales, ("float16", "bfloat16", "float32"), (groups, n))
        scheme_name("int", bits, layer.k, groups, scales)
        index = tensors.get(f"{module}.g_idx")
        if index is not None:
            layer = replace(layer, columns=sorted_columns(index, layer.k, groups))
        return layer

    def zero_points(self) -> NDArray[np.uint8]:
        """Zero points uint8[n, groups]."""
        stored = unpack_stream(words_of(self.zeros), self.bits, self.n)
        points = (stored + np.uint8(self.one_more)) & np.uint8((1 << self.bits) - 1)
        return np.ascontiguousarray(points.T)

    def matrix(self, module: str) -> Matrix:
        """The matrix, without zero points if all are the middle code."""
        middle = 1 << (self.bits - 1)
        kind = "int" if (self.zero_points() == middle).all() else "uint"
        scheme = scheme_name(kind, self.bits, self.k, self.scales.shape[0], self.scales)
        sources = (self.codes, self.zeros, self.scales)
        zero = middle if kind == "int" else 0
        made = matrix(module, (self.n, self.k), scheme, sources, partial(self.parts, scheme), zero)
        return replace(made, columns=self.columns)

    def parts(self, scheme: str) -> Parts:
        """Codes, scales and zero points."""
        codes = unpack_stream(np.ascontiguousarray(words_of(self.codes).T), self.bits, self.k)
        scales = stored_scales(scales_of(self.scales).T, scheme)
        return Parts(codes, scales, self.zero_points().view(np.int8) if scheme.startswith("uint") else None)
