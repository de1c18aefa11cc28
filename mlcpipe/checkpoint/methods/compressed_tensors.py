"""compressed-tensors, as llm-compressor writes it: groups of modules with their bits, and a format for each.

A matrix [N, K] of format pack-quantized: `weight_packed` int32 is a stream of bits along K of codes + 2**(bits - 1) or,
in files before 2026-05, of words that no code leaves; `weight_scale` [N, groups], `weight_zero_point` packed along N
where it is asymmetric, `weight_shape` [2], with `actorder` group `weight_g_idx`, the group of each column.
int-quantized: `weight` int8 and zero points int8. mxfp4-pack-quantized and nvfp4-pack-quantized: `weight_packed`
uint8[N, K / 2] of e2m1, the low nibble first, scales e8m0 of 32, or e4m3 of 16 that `weight_global_scale` float32[1]
divides. float-quantized: `weight` e4m3, see `fp8.py`; mxfp8-quantized with scales e8m0 of 32. sparse-24-bitmask of
`sparsity_config`: see `sparse.py`.
Dynamically scaled activations of 8 bits (4 for FP4) are accepted; they are rounded like any others here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.matrix import (
    E8M0,
    FLOAT_DTYPES,
    Matrix,
    byte_scales,
    check_tensor,
    e4m3_values,
    fp8_matrix,
    matrix,
    nibbles_of,
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
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.checkpoint.sparse import SPARSE_PARTS, matrix_shape, sparse_matrix
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

PACKED, INTEGERS, FP8 = "pack-quantized", "int-quantized", "float-quantized"
MXFP4, NVFP4, MXFP8 = "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"
GROUPS = {MXFP4: 32, NVFP4: 16, MXFP8: 32}  # columns of a group in formats that fix them
FORMATS = (PACKED, INTEGERS, FP8, *GROUPS)
MIXED, DENSE = "mixed-precision", "dense"  # each group of modules states its own format; no tensor has codes
_BITS: Mapping[str, tuple[int, ...]] = {
    PACKED: (2, 3, 4, 5, 6, 8), INTEGERS: (8,), FP8: (8,), MXFP4: (4,), NVFP4: (4,), MXFP8: (8,)
}  # fmt: skip
_STRATEGIES: Mapping[str, tuple[str, ...]] = {
    PACKED: ("group", "channel", "tensor"),
    INTEGERS: ("group", "channel", "tensor"),
    FP8: ("channel", "tensor", "block"),
    MXFP4: ("group",),
    NVFP4: ("tensor_group", "group"),
    MXFP8: ("group",),
}
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
          "weight_global_scale", "input_global_scale")  # fmt: skip


@dataclass(frozen=True)
class _Form:
    """How the weights of a group of modules are stored; `size`: columns of a group, or rows and columns of a block."""

    format: str
    bits: int
    strategy: str
    size: tuple[int, ...]
    symmetric: bool

    def scales(self, n: int, k: int) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales of a matrix [n, k] may have."""
        if self.strategy == "tensor":
            return (1,), ()
        if self.strategy == "channel":
            return ((n, 1),)
        if self.strategy == "block":
            return ((-(-n // self.size[0]), -(-k // self.size[1])),)
        return ((n, k // self.size[0]),)


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    usual = settings.choice("format", (*FORMATS, MIXED, DENSE))
    settings.choice("quantization_status", ("compressed", "frozen"), "compressed")
    settings.ignore("version")
    found, used = _sparse(settings.table("sparsity_config"), tensors)
    forms = sorted({_form(group, usual) for group in settings.table("config_groups").tables()}, key=repr)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        if f"{module}.weight" in found:
            raise CheckpointError(f"the codes of {shown(module)} are sparse", where=shown_path(tensors[name].file),
                                  expected="a dense matrix, or a sparse one of floats")  # fmt: skip
        found[f"{module}.weight"] = _fitting(tensors, module, forms)
        used |= {f"{module}.{part}" for part in _PARTS} & set(tensors)
    return found, used


def _sparse(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The 2:4 sparse matrices, and their tensors."""
    if settings.choice("format", (DENSE, "sparse-24-bitmask"), DENSE) == DENSE:
        return {}, set()
    settings.choice("sparsity_structure", ("2:4",), "2:4")
    settings.ignore("global_sparsity", "targets", "registry_requires_subclass")
    settings.finish()
    modules = [name.removesuffix(".bitmask") for name in tensors if name.endswith(".bitmask")]
    found = {f"{module}.weight": sparse_matrix(tensors, module) for module in modules}
    return found, {f"{module}.{part}" for module in modules for part in SPARSE_PARTS}


def _form(group: QuantizationConfig, usual: str) -> _Form:
    """The weights of a group of modules. Raises ConfigError for unknown settings that change the result."""
    form = group.choice("format", FORMATS, usual if usual in FORMATS else None)
    weights, inputs = group.table("weights"), group.table("input_activations")
    group.ignore("targets")
    group.finish()
    floats = form == FP8 or form in GROUPS
    weights.choice("type", ("float",) if floats else ("int",), "int")
    strategy = weights.choice("strategy", _STRATEGIES[form], "group" if form in GROUPS else None)
    size: tuple[int, ...] = ()
    if form in GROUPS:
        size = (weights.choice("group_size", (GROUPS[form],), GROUPS[form]),)
    elif strategy == "group":
        size = (weights.integer("group_size", 1, 1 << 16),)
    elif strategy == "block":
        size = weights.sizes("block_structure", 2)
    bits = weights.choice("num_bits", _BITS[form])
    symmetric = weights.choice("symmetric", (True,) if floats else (True, False), True)
    weights.choice("dynamic", (False,), False)
    weights.ignore("group_size", "block_structure")
    weights.finish()
    if not inputs.empty:
        inputs.choice("dynamic", (True, "local") if form == NVFP4 else (True,), False)
        inputs.choice("num_bits", (4, 8) if form in (MXFP4, NVFP4) else (8,))
        inputs.ignore("type", "strategy", "symmetric", "group_size", "block_structure")
        inputs.finish()
    return _Form(form, bits, strategy, size, symmetric)


def _fitting(tensors: Mapping[str, TensorInfo], module: str, forms: Sequence[_Form]) -> Matrix:
    """The matrix in the only form that its tensors fit."""
    found: list[Matrix] = []
    problem = CheckpointError(
        f"the tensors of {shown(module)} fit several groups of config.json", expected="one of them",
        where=shown_path(tensors[f"{module}.weight_scale"].file),
    )  # fmt: skip
    for form in forms:
        try:
            found.append(_matrix(tensors, module, form))
        except CheckpointError as error:
            problem = error
    if len(found) == 1:
        return found[0]
    raise problem


def _matrix(tensors: Mapping[str, TensorInfo], module: str, form: _Form) -> Matrix:
    """The matrix of a module. Raises CheckpointError where its tensors do not fit the form."""
    scales = sibling(tensors, module, "weight_scale")
    if form.format in GROUPS:
        return _float_matrix(tensors, module, form.format)
    codes = sibling(tensors, module, "weight_packed" if form.format == PACKED else "weight")
    n, k = (
        matrix_shape(sibling(tensors, module, "weight_shape"))
        if form.format == PACKED
        else (codes.shape if len(codes.shape) == 2 else (0, 0))
    )
    check_tensor(scales, FLOAT_DTYPES, scales.shape if scales.shape in form.scales(n, k) else form.scales(n, k)[0])
    if form.format == FP8:
        check_tensor(codes, ("float8_e4m3fn",), (n, k))
        return fp8_matrix(module, codes, scales, form.size or (1 if form.strategy == "channel" else n, k))
    if form.format == INTEGERS:
        check_tensor(codes, ("int8",), (n, k))
    elif codes.dtype != "int32" or codes.shape not in ((n, -(-k * form.bits // 32)), (n, -(-k // (32 // form.bits)))):
        check_tensor(codes, ("int32",), (n, -(-k * form.bits // 32)))
    index, zeros = (tensors.get(f"{module}.{part}") for part in ("weight_g_idx", "weight_zero_point"))
    groups = form.scales(n, k)[0][-1]
    columns = None if index is None else _columns(index, k, groups)
    if form.symmetric:
        zeros = None
    elif zeros is None:
        zeros = sibling(tensors, module, "weight_zero_point")
    if zeros is not None:
        packed = ("int32", (-(-n * form.bits // 32), groups))
        dtype, shape = packed if form.format == PACKED else ("int8", form.scales(n, k)[0])
        check_tensor(zeros, (dtype,), shape)
    scheme = scheme_name("int" if zeros is None else "uint", form.bits, k, groups, scales)
    sources = [codes, scales, *([zeros] if zeros is not None else [])]
    middle = 1 << (form.bits - 1) if zeros is None else 0
    read = partial(_parts, codes, scales, zeros, form, (n, k), scheme)
    return replace(matrix(module, (n, k), scheme, sources, read, middle), columns=columns)


def _columns(index: TensorInfo, k: int, groups: int) -> NDArray[np.int32] | None:
    """The order of the columns of `actorder` group; indices that nothing set, all -1, leave them as they are."""
    check_tensor(index, ("int32",), (k,))
    return None if (words_of(index).view(np.int32) == -1).all() else sorted_columns(index, k, groups)


def _parts(
    codes: TensorInfo, scales: TensorInfo, zeros: TensorInfo | None, form: _Form, shape: tuple[int, int], scheme: str
) -> Parts:
    n, k = shape
    groups = form.scales(n, k)[0][-1]
    values = scales_of(scales)
    stored = stored_scales(np.broadcast_to(values.reshape(-1, groups), (n, groups)), scheme)
    points = None
    if zeros is not None and form.format == PACKED:
        points = unpack_stream(np.ascontiguousarray(words_of(zeros).T), form.bits, n).T
    elif zeros is not None:
        points = np.broadcast_to(_bytes(zeros).reshape(-1, groups), (n, groups))
    if form.format == INTEGERS:
        unpacked = _bytes(codes)
    elif codes.shape[1] == -(-k * form.bits // 32):
        unpacked = unpack_stream(words_of(codes), form.bits, k)
    else:
        unpacked = _padded_words(words_of(codes), form.bits)[:, :k]
    return Parts(unpacked, stored, None if points is None else np.ascontiguousarray(points).view(np.int8))


def _bytes(tensor: TensorInfo) -> NDArray[np.uint8]:
    """int8 as codes 128 higher."""
    signed: NDArray[np.uint8] = np.frombuffer(read_bytes(tensor), np.uint8).reshape(tensor.shape) ^ np.uint8(128)
    return signed


def _padded_words(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Words that each hold whole codes."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes: NDArray[np.uint8] = (words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(len(words), -1)


def _float_matrix(tensors: Mapping[str, TensorInfo], module: str, form: str) -> Matrix:
    """A matrix of numbers of 4 or 8 bits whose scales have 8."""
    codes, scales = (
        sibling(tensors, module, part) for part in ("weight" if form == MXFP8 else "weight_packed", "weight_scale")
    )
    n, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
    k = groups * GROUPS[form]
    check_tensor(scales, ("float8_e4m3fn",) if form == NVFP4 else E8M0, (n, k // 32 * 32 // GROUPS[form]))
    if form == MXFP8:
        check_tensor(codes, ("float8_e4m3fn",), (n, k))
        return fp8_matrix(module, codes, scales, (1, GROUPS[form]))
    check_tensor(codes, ("uint8",), (n, k // 2))
    if form == MXFP4:
        return matrix(
            module, (n, k), "MXFP4", (codes, scales), lambda: Parts(nibbles_of(codes), byte_scales(scales, "MXFP4"))
        )
    divisor = sibling(tensors, module, "weight_global_scale")
    check_tensor(divisor, ("float32",), (1,))
    return matrix(module, (n, k), "fp4_g16_f32", (codes, scales, divisor), partial(_nvfp4, codes, scales, divisor))


def _nvfp4(codes: TensorInfo, scales: TensorInfo, divisor: TensorInfo) -> Parts:
    """Scales are rounded once, to float32, as the package that defines the format does."""
    values = e4m3_values(np.frombuffer(read_bytes(scales), np.uint8).reshape(scales.shape))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return Parts(nibbles_of(codes), values / scales_of(divisor))
