"""compressed-tensors, as llm-compressor writes it: groups of modules with their bits, and a format for each.

A matrix [N, K] of format pack-quantized: `weight_packed` int32 is a stream of bits along K of codes + 2**(bits - 1) or,
in files before 2026-05, of words that no code leaves; `weight_scale` [N, groups], `weight_zero_point` packed along N
where it is asymmetric, `weight_shape` [2]. int-quantized: `weight` int8 and zero points int8. mxfp4-pack-quantized:
`weight_packed` uint8[N, K / 2], the low nibble first, scales e8m0. float-quantized: `weight`
e4m3, see `fp8.py`. Activations in 8 bits that are scaled as they come are accepted: ours are rounded in finer groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.matrix import (
    FLOAT_DTYPES,
    Matrix,
    byte_scales,
    check_tensor,
    fp8_matrix,
    matrix,
    scales_of,
    scheme_name,
    sibling,
    sorted_columns,
    stored_scales,
    words_of,
)
from mlcpipe.checkpoint.methods.bit_stream import unpack_stream
from mlcpipe.checkpoint.parts import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.checkpoint.settings import Settings
from mlcpipe.errors import CheckpointError
from mlcpipe.json_files import shown, shown_path

PACKED, INTEGERS, FP8, MXFP4 = "pack-quantized", "int-quantized", "float-quantized", "mxfp4-pack-quantized"
FORMATS = (PACKED, INTEGERS, FP8, MXFP4)
MIXED = "mixed-precision"  # each group of modules says its own format
_BITS: Mapping[str, tuple[int, ...]] = {PACKED: (2, 3, 4, 5, 6, 8), INTEGERS: (8,), FP8: (8,), MXFP4: (4,)}
_STRATEGIES: Mapping[str, tuple[str, ...]] = {
    PACKED: ("group", "channel", "tensor"),
    INTEGERS: ("group", "channel", "tensor"),
    FP8: ("channel", "tensor", "block"),
    MXFP4: ("group",),
}
_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


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


def matrices(settings: Settings, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    usual = settings.choice("format", (*FORMATS, MIXED))
    settings.choice("quantization_status", ("compressed", "frozen"), "compressed")
    settings.table("sparsity_config").choice("format", ("dense",), "dense")
    settings.ignore("global_compression_ratio", "ignore", "version")
    forms = sorted({_form(group, usual) for group in settings.table("config_groups").tables()}, key=repr)
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        module = name.removesuffix(".weight_scale")
        found[f"{module}.weight"] = _fitting(tensors, module, forms)
        used |= {f"{module}.{part}" for part in _PARTS} & set(tensors)
    return found, used


def _form(group: Settings, usual: str) -> _Form:
    """The weights of a group of modules. Raises ConfigError for what changes the result and is not known."""
    form = group.choice("format", FORMATS, None if usual == MIXED else usual)
    weights, inputs = group.table("weights"), group.table("input_activations")
    group.ignore("targets")
    group.finish()
    weights.choice("type", ("float",) if form in (FP8, MXFP4) else ("int",), "int")
    strategy = weights.choice("strategy", _STRATEGIES[form], "group" if form == MXFP4 else None)
    size: tuple[int, ...] = ()
    if strategy == "group":
        size = (weights.integer("group_size", 1, 1 << 16, 32 if form == MXFP4 else None),)
    elif strategy == "block":
        size = weights.sizes("block_structure", 2)
    bits = weights.choice("num_bits", _BITS[form])
    symmetric = weights.choice("symmetric", (True, False), True)
    weights.choice("dynamic", (False,), False)
    weights.ignore(
        "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "group_size", "block_structure"
    )
    weights.finish()
    if not inputs.empty:
        inputs.choice("dynamic", (True,), False)
        inputs.choice("num_bits", (8,))
        inputs.ignore("type", "strategy", "symmetric", "group_size", "observer", "observer_kwargs", "block_structure",
                      "scale_dtype", "zp_dtype")  # fmt: skip
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
    if form.format == MXFP4:
        codes = sibling(tensors, module, "weight_packed")
        n, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
        check_tensor(codes, ("uint8",), (n, groups * 16))
        check_tensor(scales, ("uint8", "float8_e8m0fnu"), (n, groups))
        return matrix(module, (n, groups * 32), "MXFP4", (codes, scales), partial(_mxfp4, codes, scales))
    codes = sibling(tensors, module, "weight_packed" if form.format == PACKED else "weight")
    n, k = _shape(tensors, module) if form.format == PACKED else (codes.shape if len(codes.shape) == 2 else (0, 0))
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
    columns = None if index is None else sorted_columns(index, k, groups)
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


def _shape(tensors: Mapping[str, TensorInfo], module: str) -> tuple[int, int]:
    """What `weight_shape` says. Raises CheckpointError for sizes that no matrix in a file has."""
    stored = sibling(tensors, module, "weight_shape")
    if stored.dtype not in ("int64", "int32") or stored.shape != (2,):
        check_tensor(stored, ("int64",), (2,))
    n, k = (int(size) for size in np.frombuffer(read_bytes(stored), "<i8" if stored.dtype == "int64" else "<i4"))
    if not (0 < n < 1 << 24 and 0 < k < 1 << 24):
        raise CheckpointError(f"tensor {shown(stored.name)} is not the shape of a matrix",
                              where=shown_path(stored.file), found=f"[{n}, {k}]")  # fmt: skip
    return n, k


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
    """Words whose codes end within them."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes: NDArray[np.uint8] = (words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)).astype(np.uint8)
    return codes.reshape(len(words), -1)


def _mxfp4(codes: TensorInfo, scales: TensorInfo) -> Parts:
    pairs = np.frombuffer(read_bytes(codes), np.uint8).reshape(codes.shape)
    return Parts(np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1), byte_scales(scales, "MXFP4"))
