"""Rope scaling of GGUF files as config.json's `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_float32
from mlcpipe.errors import ConfigError
from mlcpipe.support.json_files import shown, shown_path

MAX_NUMBERS = 4096
# The values of every published model with this scaling; the file holds only the divisors derived from them.
_LOW, _HIGH = 1.0, 4.0
_TOLERANCE = 1e-4
_ENDLESS = 1e20  # divisors of frequencies that leave nothing of them


def linear_or_yarn(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    """`rope_scaling` of `rope.scaling.*`; None for no scaling. Raises ConfigError for another type."""
    prefix = f"{arch}.rope.scaling."
    factor = metadata.number(f"{prefix}factor", metadata.number(f"{arch}.rope.scale_linear", 1.0))
    kind = metadata.text(f"{prefix}type", "linear")
    attention = metadata.number(f"{prefix}attn_factor", 1.0)
    if attention != 1.0:
        raise metadata.error(f"{prefix}attn_factor", "1, or no such key", attention)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.error(f"{prefix}type", "none, linear or yarn", shown(kind))
    original = metadata.integer(f"{prefix}original_context_length", metadata.integer(f"{arch}.context_length"))
    table = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if (key := f"{prefix}yarn_{name}") in metadata.values:
            table[name] = metadata.number(key)
    usual = {"ext_factor": 1.0, "attn_factor": 0.1 * math.log(max(factor, 1.0)) + 1.0}
    for name, neutral in usual.items():
        if abs((value := metadata.number(key := f"{prefix}yarn_{name}", neutral)) - neutral) > _TOLERANCE:
            raise metadata.error(key, f"{neutral:g}, or no such key", value)
    if multiplier := metadata.number(f"{prefix}yarn_log_multiplier", 0.0):
        table |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    return table


def llama3(factors: TensorInfo, theta: float, rotated: int) -> dict[str, Any]:
    """`rope_scaling` that makes these divisors of the frequencies. Raises ConfigError if they are none of llama3's."""
    found = vector(factors, rotated // 2).astype(np.float64)
    factor = round(float(found.max()), 6)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    original = _original_length(found, wavelengths, factor)
    smooth = np.clip((original / wavelengths - _LOW) / (_HIGH - _LOW), 0, 1)
    if factor < 1 or not np.allclose(found, 1 / ((1 - smooth) / max(factor, 1) + smooth), rtol=_TOLERANCE, atol=0):
        raise ConfigError(
            f"{factors.name} is not supported", where=shown_path(factors.file),
            expected=f"llama3's divisors of frequencies, with factors {_LOW:g} and {_HIGH:g}",
            found=f"others, up to {factor:g}",
        )  # fmt: skip
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": original,
    }


def proportional(factors: TensorInfo, rotated: int) -> dict[str, Any]:
    """`rope_scaling` of divisors that leave the first angles alone and make 0 of the others. Raises ConfigError."""
    found = vector(factors, rotated // 2)
    count = int((found == 1).sum())
    if (found[:count] != 1).any() or (found[count:] < _ENDLESS).any():
        raise ConfigError(
            f"{factors.name} is not supported", where=shown_path(factors.file),
            expected=f"1 for the first pairs, at least {_ENDLESS:g} for the others", found="other divisors",
        )  # fmt: skip
    return {"rope_type": "proportional", "partial_rotary_factor": min(1.0, math.nextafter(2 * count / rotated, 1.0))}


def _original_length(divisors: NDArray[np.float64], wavelengths: NDArray[np.float64], factor: float) -> int:
    """The context before scaling: from divisors between 1 and `factor`, else any that gives all of these."""
    between = (divisors > 1) & (divisors < factor)
    if between.any():
        smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        return max(2, round(float(np.median(wavelengths[between] * (smooth * (_HIGH - _LOW) + _LOW)))))
    return max(2, math.ceil(_HIGH * float(wavelengths[divisors <= 1].max(initial=0.0))))


def longrope(metadata: Metadata, arch: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any] | None:
    """`rope_scaling` of Phi-3's two tensors of factors; None without them."""
    names = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if not any(name in tensors for name in names):
        return None
    head = metadata.integer(f"{arch}.embedding_length") // metadata.integer(f"{arch}.attention.head_count")
    count = metadata.integer(f"{arch}.rope.dimension_count", head) // 2
    for name in names:
        if name not in tensors:
            raise ConfigError(f"no {name}", where=metadata.where, expected="short and long factors")
    short, long = (vector(tensors[name], count).tolist() for name in names)
    attention = metadata.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}


def vector(tensor: TensorInfo, count: int) -> NDArray[np.float32]:
    """The numbers of a short tensor, f32[count]. Raises ConfigError for another shape."""
    if tensor.shape != (count,) or count > MAX_NUMBERS:
        raise ConfigError(f"{tensor.name} has the wrong shape", expected=[count], found=list(tensor.shape))
    return read_float32(tensor)
