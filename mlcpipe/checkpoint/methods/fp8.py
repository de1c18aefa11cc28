"""FP8 of DeepSeek and Qwen3: `weight` e4m3[N, K] and `weight_scale_inv`, which multiplies a block of rows and columns.

No kernel for CPUs reads e4m3: `keep` rounds each 32 numbers of a row once more, to 8-bit codes with a float16 scale.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, fp8_matrix, sibling
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.safetensors_reader import TensorInfo


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    settings.choice("fmt", ("e4m3",), "e4m3")
    settings.choice("scale_fmt", ("float",), "float")
    settings.choice("activation_scheme", ("dynamic",), "dynamic")
    settings.choice("expert_dtype", ("fp8",), "fp8")
    block = settings.sizes("weight_block_size", 2)
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        module = name.removesuffix(".weight_scale_inv")
        codes = sibling(tensors, module, "weight")
        n, k = codes.shape if len(codes.shape) == 2 else (0, 0)
        check_tensor(codes, ("float8_e4m3fn",), (n, k))
        check_tensor(tensors[name], FLOAT_DTYPES, (-(-n // block[0]), -(-k // block[1])))
        found[f"{module}.weight"] = fp8_matrix(module, codes, tensors[name], block)
        used |= {name, f"{module}.weight"}
    return found, used
