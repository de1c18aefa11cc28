"""Quantized safetensors checkpoints, packed bit by bit from the formats' descriptions: not by the packages that define them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.errors import CheckpointError, ConfigError, MlcpipeError
from tests.unit.checkpoint.helpers import numbers, write_tensors

Array = NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Codes:
    """A matrix (code - zero) * scale + bias: codes u8[N, K]; zeros u8, scales and biases [N, groups].

    Column columns[i] belongs to the group of i where `columns` are given.
    """

    codes: Array
    zeros: Array
    scales: Array
    biases: Array | None = None
    columns: Array | None = None

    def values(self) -> Array:
        """float32[N, K]."""
        n, k = self.codes.shape
        order = np.arange(k) if self.columns is None else self.columns
        steps = self.codes[:, order].reshape(n, self.scales.shape[1], -1).astype(np.float32)
        steps -= self.zeros[:, :, None].astype(np.float32)
        values = steps * self.scales[:, :, None].astype(np.float32)
        if self.biases is not None:
            values += self.biases[:, :, None].astype(np.float32)
        return np.ascontiguousarray(values.reshape(n, k)[:, np.argsort(order)])


@dataclass(frozen=True)
class Floats:
    """A matrix of e2m1 codes u8[N, K] (OCP Microscaling Formats 1.0) times scales f32[N, groups]; `stored` in 8 bits.

    Those of NVFP4 are e4m3 that a `divisor` divides, those of MXFP4 powers of two.
    """

    codes: Array
    stored: Array
    divisor: Array | None

    @classmethod
    def of(cls, codes: Array, scales: Array, group: int) -> Floats:
        """With the scales that are next to `scales` f32[N, groups]."""
        if group == 32:
            return cls(codes, (np.rint(np.log2(scales)) + 127).astype(np.uint8), None)
        divisor = np.array([448 / scales.max()], np.float32)
        return cls(codes, (scales * divisor).astype(ml_dtypes.float8_e4m3fn), divisor)

    @property
    def scales(self) -> Array:
        if self.divisor is None:
            return np.exp2(self.stored.astype(np.float32) - 127)
        return self.stored.astype(np.float32) / self.divisor

    def values(self) -> Array:
        """float32[N, K]."""
        numbers = self.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32).reshape(*self.scales.shape, -1)
        return (numbers * self.scales[:, :, None]).reshape(self.codes.shape)


@dataclass(frozen=True)
class Form:
    """How a checkpoint is rounded: bits, columns of a group (0: a row), zero points or minima, dtype of scales."""

    bits: int = 4
    group: int = 32
    kind: str = "zeros"  # or "middle", "biases", "floats"
    dtype: Any = np.float16
    fields: Mapping[str, Any] = field(default_factory=dict)

    def round(self, w: Array, name: str = "") -> Codes | Floats:
        """The nearest codes of w float32[N, K]; with desc_act groups are of columns anywhere.

        Their order is another one for another N, layer or expert.
        """
        n, k = w.shape
        if self.kind == "floats":
            groups = w.reshape(n, k // self.group, self.group)
            scales = np.maximum(np.abs(groups).max(-1) / 6, 1e-6)
            codes = (groups / scales[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
            return Floats.of(codes.reshape(n, k), scales, self.group)
        is_sorted = self.fields.get("desc_act") or self.fields.get("actorder") == "group"
        columns = (
            np.random.default_rng([n, *map(int, re.findall(r"(?<=\.)\d+", name))]).permutation(k) if is_sorted else None
        )
        groups = (w if columns is None else w[:, columns]).reshape(n, k // (self.group or k), -1)
        top = (1 << self.bits) - 1
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        if self.kind == "middle":
            zeros = np.full(low.shape, 1 << (self.bits - 1), np.uint8)
            scales = (np.abs(groups).max(-1) / (1 << (self.bits - 1))).astype(self.dtype)
        else:
            scales = ((high - low) / top).astype(self.dtype)
            zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top).astype(np.uint8)
        biases = None
        offset = zeros.astype(np.float32)
        if self.kind == "biases":
            biases, zeros = low.astype(self.dtype), np.zeros_like(zeros)
            offset = -low / scales.astype(np.float32)
        codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None] + offset[..., None]), 0, top)
        codes = codes.astype(np.uint8).reshape(n, k)
        return Codes(codes if columns is None else codes[:, np.argsort(columns)], zeros, scales, biases, columns)


def pack_bits(codes: Array, bits: int) -> Array:
    """A stream of bits along the last axis, the lowest first: int32[N, X * bits / 32]."""
    stream = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    packed = np.packbits(stream.reshape(len(codes), -1), axis=1, bitorder="little")
    padded = np.zeros((len(codes), -(-packed.shape[1] // 4) * 4), np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view("<i4")


def pack_awq(codes: Array) -> Array:
    """Codes [X, N] -> int32[X, N / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, row in enumerate(AWQ_ORDER):
        words |= codes[:, row::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def group_index(codes: Codes) -> Array:
    """The group of each column, int32[K]."""
    k = codes.codes.shape[1]
    index = np.repeat(np.arange(codes.scales.shape[1], dtype=np.int32), k // codes.scales.shape[1])
    return index if codes.columns is None else index[np.argsort(codes.columns)]


def gptq(module: str, codes: Codes, form: Form) -> dict[str, Array]:
    """The tensors of a GPTQ module; version 1 unless the fields say gptq_v2."""
    top = (1 << form.bits) - 1
    less = 0 if form.fields.get("checkpoint_format") == "gptq_v2" else 1
    zeros = (codes.zeros.astype(np.int64) - less & top).astype(np.uint8)
    return {
        f"{module}.qweight": np.ascontiguousarray(pack_bits(codes.codes, form.bits).T),
        f"{module}.qzeros": pack_bits(np.ascontiguousarray(zeros.T), form.bits),
        f"{module}.scales": np.ascontiguousarray(codes.scales.T),
        f"{module}.g_idx": group_index(codes),
    }


def awq(module: str, codes: Codes, form: Form) -> dict[str, Array]:
    """The tensors of an AWQ module."""
    return {
        f"{module}.qweight": pack_awq(np.ascontiguousarray(codes.codes.T)),
        f"{module}.qzeros": pack_awq(np.ascontiguousarray(codes.zeros.T)),
        f"{module}.scales": np.ascontiguousarray(codes.scales.T),
    }


def mlx(module: str, codes: Codes, form: Form) -> dict[str, Array]:
    """The tensors of an MLX module in mode affine."""
    assert codes.biases is not None
    return {
        f"{module}.weight": pack_bits(codes.codes, form.bits).view(np.uint32),
        f"{module}.scales": codes.scales,
        f"{module}.biases": codes.biases,
    }


def packed_tensors(module: str, codes: Codes, form: Form) -> dict[str, Array]:
    """The tensors of a module of compressed-tensors, pack-quantized."""
    zeros = {f"{module}.weight_zero_point": np.ascontiguousarray(pack_bits(codes.zeros.T.copy(), form.bits).T)}
    return {
        f"{module}.weight_packed": pack_bits(codes.codes, form.bits),
        f"{module}.weight_scale": codes.scales,
        f"{module}.weight_shape": np.array(codes.codes.shape, np.int64),
        **(zeros if form.kind == "zeros" else {}),
        **({f"{module}.weight_g_idx": group_index(codes)} if codes.columns is not None else {}),
    }


def int8_tensors(module: str, codes: Codes, form: Form) -> dict[str, Array]:
    """The tensors of a module of compressed-tensors, int-quantized."""
    zeros = {f"{module}.weight_zero_point": (codes.zeros ^ 128).view(np.int8)}
    return {
        f"{module}.weight": (codes.codes ^ 128).view(np.int8),
        f"{module}.weight_scale": codes.scales,
        **(zeros if form.kind == "zeros" else {}),
    }


def float4_tensors(module: str, codes: Floats, form: Form) -> dict[str, Array]:
    """The tensors of a module of compressed-tensors, mxfp4-pack-quantized or nvfp4-pack-quantized."""
    tensors = {
        f"{module}.weight_packed": codes.codes[:, ::2] | codes.codes[:, 1::2] << 4,
        f"{module}.weight_scale": codes.stored,
    }
    return tensors if codes.divisor is None else {**tensors, f"{module}.weight_global_scale": codes.divisor}


def float4_config(form: Form, name: str) -> dict[str, Any]:
    """What config.json has."""
    fields = {"type": "float", "strategy": "group" if form.group == 32 else "tensor_group"}
    return compressed_config(Form(4, form.group, "middle", fields={**fields, **form.fields}), name)


def compressed_config(form: Form, name: str = "pack-quantized") -> dict[str, Any]:
    """What config.json has; the fields of a form are those of its weights."""
    weights = {"num_bits": form.bits, "type": "int", "symmetric": form.kind == "middle", "dynamic": False,
               "strategy": "group" if form.group else "channel", "group_size": form.group or None, **form.fields}  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if name[0] == "i" else None}
    fields = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group},
              "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip
    return {"quantization_config": fields}


def gptq_config(form: Form) -> dict[str, Any]:
    """What config.json has."""
    fields = {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group or -1,
        "desc_act": False,
        "sym": False,
    }
    return {"quantization_config": {**fields, **form.fields}}


def awq_config(form: Form) -> dict[str, Any]:
    """What config.json has."""
    fields = {"quant_method": "awq", "bits": 4, "group_size": form.group or -1, "zero_point": True, "version": "gemm"}
    return {"quantization_config": {**fields, **form.fields}}


def mlx_config(form: Form) -> dict[str, Any]:
    """What config.json has, twice as mlx-lm writes it."""
    fields = {"group_size": form.group, "bits": form.bits, "mode": "affine", **form.fields}
    return {"quantization": fields, "quantization_config": fields}


Pack = Callable[[str, Any, Form], dict[str, Array]]
METHODS: Mapping[str, tuple[Pack, Callable[[Form], dict[str, Any]]]] = {
    "gptq": (gptq, gptq_config),
    "awq": (awq, awq_config),
    "mlx": (mlx, mlx_config),
    "compressed-tensors": (packed_tensors, compressed_config),
    "int-quantized": (int8_tensors, partial(compressed_config, name="int-quantized")),
    "mxfp4": (float4_tensors, partial(float4_config, name="mxfp4-pack-quantized")),
    "nvfp4": (float4_tensors, partial(float4_config, name="nvfp4-pack-quantized")),
}


def is_rounded(name: str, value: Array, method: str) -> bool:
    """Whether a tensor is a matrix that the method rounds: MLX takes the embedding, the output and routers, too."""
    names = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
    more = ("embed_tokens.weight", "lm_head.weight", "gate.weight") if method == "mlx" else ()
    return value.ndim == 2 and name.endswith((*names, *more))


def stacked(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The same tensors, those of experts in one for all, as mlx-lm has them."""
    found: dict[str, Any] = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.+)\.experts\.\d+\.(\w+)\.(\w+)", name)  # the experts come in their order
        if match is None:
            found[name] = array
        else:
            block, projection, part = match.groups()
            usual = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(projection, projection)
            found.setdefault(f"{block}.switch_mlp.{usual}.{part}", []).append(array)
    return {name: np.stack(array) if isinstance(array, list) else array for name, array in found.items()}


def quantize(source: Path, folder: Path, method: str, form: Form) -> dict[str, Array]:
    """Write the checkpoint `source` to `folder` with the matrices of its layers rounded -> all tensors as float32."""
    pack, config_of = METHODS[method]
    found = open_checkpoint(source)
    stored: dict[str, Array] = {}
    values: dict[str, Array] = {}
    for name in found.tensors:
        values[name] = found.read(name)
        if not is_rounded(name, values[name], method):
            stored[name] = values[name]
            continue
        codes = form.round(values[name], name)
        stored |= pack(name.removesuffix(".weight"), codes, form)
        values[name] = codes.values()
    folder.mkdir(parents=True, exist_ok=True)
    for file in found.folder.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps({**found.config, **config_of(form)}), encoding="utf-8")
    write_tensors(folder / "model.safetensors", stacked(stored) if method == "mlx" else stored)
    return values


BFLOAT16 = ml_dtypes.bfloat16
N, K = 64, 256


def random_codes(form: Form) -> Any:
    """Every code and zero point, and scales of both signs."""
    draw = np.random.default_rng(form.bits)
    groups = K // (form.group or K)
    if form.kind == "floats":
        codes = draw.integers(0, 16, (N, K), np.uint8)
        return Floats.of(codes, draw.uniform(1e-3, 1, (N, groups)).astype(np.float32), form.group)
    zeros = draw.integers(0, 1 << form.bits, (N, groups), np.uint8)
    if form.kind == "middle":
        zeros[...] = 1 << (form.bits - 1)
    scales, biases = (draw.standard_normal((N, groups)).astype(form.dtype) for _ in range(2))
    codes = draw.integers(0, 1 << form.bits, (N, K), np.uint8)
    return Codes(codes, zeros * 0, scales, biases) if form.kind == "biases" else Codes(codes, zeros, scales)


def write(
    folder: Path, method: str, form: Form, *, config: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}
) -> Any:
    """A checkpoint with one module `m.q_proj`; `config` and `tensors` replace fields and tensors, None removes them."""
    pack, config_of = METHODS[method]
    codes = random_codes(form)
    stored: dict[str, Any] = {**pack("m.q_proj", codes, form), "m.norm.weight": numbers(K), **tensors}
    name, fields = next(iter(config_of(form).items()))
    fields = {key: value for key, value in {**fields, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", name: fields}), encoding="utf-8")
    write_tensors(folder / "model.safetensors", {key: value for key, value in stored.items() if value is not None})
    return codes


def refused(folder: Path) -> str:
    """The message of opening and reading everything. Raises AssertionError where nothing is refused."""
    with pytest.raises(MlcpipeError) as error:
        checkpoint: Checkpoint = open_checkpoint(folder)
        for name in checkpoint.tensors:
            checkpoint.read_parts(name) if name.endswith("proj.weight") else checkpoint.read(name)
    assert isinstance(error.value, CheckpointError | ConfigError) and "\n" not in str(error.value)
    return str(error.value)
