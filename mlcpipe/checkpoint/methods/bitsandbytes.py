"""bitsandbytes: NF4 and FP4 of QLoRA, and the 8-bit codes of LLM.int8.

4 bits: `weight` uint8 has two codes of a flat matrix [N, K] a byte, the high nibble first; a number is
`quant_map`[code] * `absmax` of its 64. With nested statistics `absmax` are codes, too: `nested_quant_map`[code] *
`nested_absmax` of 256 of them, plus an offset. 8 bits: `weight` int8[N, K] * `SCB` float32[N] / 127.
Kernels have levels of the 4-bit codes in integers: `keep` moves each by up to half a step of 1 / 124 (FP4: 1 / 120).
LLM.int8's treatment of activation outliers is not implemented: activations are rounded in groups of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.matrix import Matrix, check_tensor, matrix, sibling
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import parse_json_object, shown, shown_path

BLOCK, NESTED_BLOCK = 64, 256
MAX_STATE_BYTES = 4096
STATES = {"quant_state.bitsandbytes__nf4": ("NF4", 124), "quant_state.bitsandbytes__fp4": ("BNB_FP4", 120)}
_IGNORED = (
    "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_skip_modules", "llm_int8_threshold",
)  # fmt: skip


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    settings.choice("bnb_4bit_quant_storage", ("uint8",), "uint8")
    settings.choice("llm_int8_has_fp16_weight", (False,), False)
    settings.choice("load_in_4bit", (True, False), False)
    settings.choice("load_in_8bit", (True, False), False)
    settings.ignore(*_IGNORED)
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in tensors:
        module, _, rest = name.partition(".weight.")
        if rest in STATES:
            state = _State.of(tensors, module, rest)
            found[f"{module}.weight"] = state.matrix(module)
            used |= {name, *(f"{module}.{part}" for part in state.tensors)}
        elif name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            found[f"{module}.weight"] = _int8(tensors, module)
            used |= {name, f"{module}.weight", f"{module}.weight_format"} & set(tensors)
    return found, used


def _int8(tensors: Mapping[str, TensorInfo], module: str) -> Matrix:
    codes, scales = sibling(tensors, module, "weight"), tensors[f"{module}.SCB"]
    n, k = codes.shape if len(codes.shape) == 2 else (0, 0)
    check_tensor(codes, ("int8",), (n, -(-k // 32) * 32))
    check_tensor(scales, ("float32",), (n,))
    order = tensors.get(f"{module}.weight_format")

    def parts() -> Parts:
        if order is not None and (order.nbytes > 8 or any(read_bytes(order))):
            raise CheckpointError(f"the codes of {shown(module)} are in the order of a kernel",
                                  where=shown_path(order.file), expected="0 in weight_format: rows")  # fmt: skip
        steps = np.frombuffer(read_bytes(scales), "<f4") / np.float32(127)
        return Parts(np.frombuffer(read_bytes(codes), np.uint8).reshape(n, k) ^ np.uint8(128), steps[:, None])

    return matrix(module, (n, k), "int8_row_f32", (codes, scales), parts, 128)


@dataclass(frozen=True)
class _State:
    """The tensors of a matrix [n, k] in 4 bits, by the part of their names after the module's; `steps` of a level 1."""

    tensors: Mapping[str, TensorInfo]
    scheme: str
    steps: int
    n: int
    k: int
    offset: float

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], module: str, state: str) -> _State:
        """The state of a module. Raises CheckpointError for one that does not fit its tensors."""
        stored = tensors[f"{module}.weight.{state}"]
        fields = _fields(stored)
        shape, nested = fields.get("shape"), "nested_blocksize" in fields
        sizes = shape if isinstance(shape, list) and len(shape) == 2 else [0, 0]
        known = fields.get("blocksize") == BLOCK and fields.get("quant_type") == state[-3:]
        known &= all(type(size) is int and 0 < size < 1 << 24 for size in sizes) and sizes[1] % BLOCK == 0
        offset = fields.get("nested_offset", 0.0)
        known &= not nested or (fields["nested_blocksize"] == NESTED_BLOCK and fields.get("nested_dtype") == "float32")
        if not known or type(offset) is not float or not np.isfinite(offset):
            raise CheckpointError(
                f"tensor {shown(stored.name)} is not a known state", where=shown_path(stored.file),
                expected="blocks of 64 along rows of whole blocks, nested ones of 256", found=shown(fields),
            )  # fmt: skip
        n, k = sizes
        names = ["weight", "weight.absmax", "weight.quant_map"]
        names += ["weight.nested_absmax", "weight.nested_quant_map"] if nested else []
        parts = {name: sibling(tensors, module, name) for name in names}
        blocks = n * k // BLOCK
        check_tensor(parts["weight"], ("uint8",), (n * k // 2, 1))
        check_tensor(parts["weight.absmax"], ("uint8" if nested else "float32",), (blocks,))
        check_tensor(parts["weight.quant_map"], ("float32",), (16,))
        if nested:
            check_tensor(parts["weight.nested_absmax"], ("float32",), (-(-blocks // NESTED_BLOCK),))
            check_tensor(parts["weight.nested_quant_map"], ("float32",), (256,))
        return cls(parts, *STATES[state], n, k, offset)

    def matrix(self, module: str) -> Matrix:
        """The matrix of the module."""
        made = matrix(module, (self.n, self.k), self.scheme, tuple(self.tensors.values()), self.parts)
        return replace(made, values=self.values)

    def parts(self) -> Parts:
        """Codes, and scales of levels in whole steps."""
        return Parts(self._codes(), (self._absmax() / np.float32(self.steps)).astype(np.float16))

    def values(self) -> NDArray[np.float32]:
        """The numbers, each rounded once more where statistics are nested."""
        numbers = self._numbers("weight.quant_map")[self._codes()].reshape(self.n, -1, BLOCK)
        values: NDArray[np.float32] = (numbers * self._absmax()[:, :, None]).reshape(self.n, self.k)
        return values

    def _codes(self) -> NDArray[np.uint8]:
        pairs = np.frombuffer(read_bytes(self.tensors["weight"]), np.uint8)
        return np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(self.n, self.k)

    def _absmax(self) -> NDArray[np.float32]:
        """float32[n, blocks of a row]."""
        stored = self.tensors["weight.absmax"]
        if stored.dtype == "float32":
            return self._numbers("weight.absmax").reshape(self.n, -1)
        codes = np.frombuffer(read_bytes(stored), np.uint8)
        scales = np.repeat(self._numbers("weight.nested_absmax"), NESTED_BLOCK)[: len(codes)]
        values = self._numbers("weight.nested_quant_map")[codes] * scales + np.float32(self.offset)
        absmax: NDArray[np.float32] = values.reshape(self.n, -1)
        return absmax

    def _numbers(self, part: str) -> NDArray[np.float32]:
        return np.frombuffer(read_bytes(self.tensors[part]), "<f4")


def _fields(stored: TensorInfo) -> dict[str, Any]:
    """The JSON object in a tensor of bytes."""
    if stored.dtype != "uint8" or stored.nbytes > MAX_STATE_BYTES:
        check_tensor(stored, ("uint8",), (MAX_STATE_BYTES,))
    return parse_json_object(
        bytes(read_bytes(stored)), where=f"tensor {stored.name}", error=CheckpointError, max_values=100
    )
