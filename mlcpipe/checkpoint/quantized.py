"""Quantized checkpoints in safetensors: matrices that several stored tensors make up, under their usual names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, e4m3_values, e8m0_values
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.json_files import shown, shown_path

FLOATS = ("MXFP4", "NVFP4", "fp4_g16_f32")
_FIELD, _MLX_FIELD = "quantization_config", "quantization"


@dataclass(frozen=True)
class QuantizedCheckpoint(Checkpoint):
    """A checkpoint with matrices of codes. `method` is the name of their quantization in config.json."""

    method: str = field(kw_only=True)

    @property
    def quantized_as(self) -> str | None:
        return self.method if not self.tensors or any(True for _ in self._coded()) else None

    @property
    def keeps_all(self) -> bool:
        return all(tensor.values is None for tensor in self._coded())

    def _coded(self) -> Iterator[Matrix]:
        """The matrices that have codes; the others are sparse ones of floats."""
        return (m for m in self.tensors.values() if isinstance(m, Matrix) and m.dtype not in FLOAT_DTYPES)

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor `name` as a new float32 array; codes become numbers in float32, each rounded once or twice."""
        tensor = self.info(name)
        if not isinstance(tensor, Matrix):
            return super().read(name)
        if tensor.values is not None:
            return self._checked(name, tensor.values())
        parts, (n, k) = self.read_parts(name), tensor.shape
        if tensor.dtype in FLOATS:
            return self._checked(name, _fp4_values(parts, tensor.dtype).reshape(n, k))
        scales = widened(parts.scales)
        each = 2 if tensor.dtype.startswith("affine") else 1
        zeros = parts.subs.view(np.uint8)[:, :, None] if parts.subs is not None else np.uint8(tensor.zero)
        steps = parts.codes.reshape(n, scales.shape[1] // each, -1).astype(np.float32) - zeros
        values = steps * scales[:, ::each, None]
        if each == 2:
            values += scales[:, 1::2, None]
        values = values.reshape(n, k)
        if tensor.columns is not None:
            values = np.ascontiguousarray(values[:, np.argsort(tensor.columns)])
        return self._checked(name, values)

    def _checked(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if not np.isfinite(values).all():
            raise _not_finite(self, name)
        return values

    def columns(self, name: str) -> NDArray[np.int32] | None:
        tensor = self.info(name)
        return tensor.columns if isinstance(tensor, Matrix) else None

    def read_parts(self, name: str) -> Parts:
        tensor = self.info(name)
        if not isinstance(tensor, Matrix):
            return super().read_parts(name)
        parts = tensor.parts()
        if not parts.finite:
            raise _not_finite(self, name)
        return parts if tensor.columns is None else replace(parts, codes=parts.codes[:, tensor.columns])


def _fp4_values(parts: Parts, scheme: str) -> NDArray[np.float32]:
    """Numbers of 4 bits times their scales, float32[N, groups, columns]."""
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[parts.codes & 7]
    signed = np.where(parts.codes & 8, -levels, levels).reshape(*parts.scales.shape, -1)
    scales = parts.scales
    if scheme != "fp4_g16_f32":
        scales = (e8m0_values if scheme == "MXFP4" else e4m3_values)(scales.view(np.uint8))
    with np.errstate(over="ignore"):
        values: NDArray[np.float32] = signed * scales[:, :, None]
    return values


def _not_finite(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {shown(name)} is not finite", where=shown_path(checkpoint.path), expected="finite scales",
        next_step="the file is damaged: download it again",
    )  # fmt: skip


def method_names() -> tuple[str, ...]:
    """The quantization methods that have a reader, as config.json names them."""
    folder = str(Path(__file__).parent / "methods")
    names = (module.name.replace("_", "-") for module in pkgutil.iter_modules([folder]))
    return tuple(sorted(name for name in names if name != "bit-stream"))


def quantized(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, with its matrices of codes if config.json says that it is quantized.

    Raises ConfigError for a method, or a field of it, that no reader knows, and CheckpointError for its tensors.
    """
    found = _settings(checkpoint.config)
    if found is None:
        return checkpoint
    method, settings = found
    reader = importlib.import_module(f"mlcpipe.checkpoint.methods.{method.replace('-', '_')}")
    matrices, used = reader.matrices(settings, checkpoint.tensors)
    settings.finish()
    plain = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in used}
    for name in plain.keys() & matrices.keys():
        raise CheckpointError(f"tensor {shown(name)} is stored twice", where=shown_path(checkpoint.path))
    ordered = MappingProxyType(dict(sorted((plain | matrices).items())))
    return QuantizedCheckpoint(
        checkpoint.path,
        _plain_config(checkpoint),
        checkpoint.generation_config,
        ordered,
        checkpoint.weight_files,
        method=method,
    )


def without_quantization(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint whose tensors are not known, without the field for them. Raises ConfigError for another method."""
    found = _settings(checkpoint.config)
    if found is None:
        return checkpoint
    config, files = _plain_config(checkpoint), checkpoint.weight_files
    return QuantizedCheckpoint(
        checkpoint.path, config, checkpoint.generation_config, checkpoint.tensors, files, method=found[0]
    )


def _plain_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: value for name, value in checkpoint.config.items() if name not in (_FIELD, _MLX_FIELD)}


def _settings(config: Mapping[str, Any]) -> tuple[str, QuantizationConfig] | None:
    """The method's name and its fields; None for a checkpoint that is not quantized. Raises ConfigError."""
    values, mlx = config.get(_FIELD), config.get(_MLX_FIELD)
    if isinstance(mlx, Mapping) and "bits" in mlx:
        return "mlx", QuantizationConfig(mlx, _MLX_FIELD)
    if not isinstance(values, Mapping):
        return None
    method = values.get("quant_method")
    name = method.removeprefix("intel/") if isinstance(method, str) else repr(method)
    settings = QuantizationConfig({key: value for key, value in values.items() if key != "quant_method"}, _FIELD)
    if name not in method_names():
        raise ConfigError(
            "field quantization_config.quant_method is not supported", where=settings.where,
            expected=", ".join(method_names()), found=shown(name),
            next_step="take the original checkpoint, or one in a format that is supported",
        )  # fmt: skip
    return name, settings
