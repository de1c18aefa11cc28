"""Quantization schemes, found by file name: `<scheme>.py` in this package."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.closest import closest
from mlcpipe.support.defaults import AUTO, KEEP

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], str]]

_SCHEME_FILE = re.compile(r"q\d+f\d+(_[\dkm])?")
_KV_CACHE_DTYPES = {"auto": None, "f32": "float32", "f16": "float16", "q8": "q8", "q4": "q4"}
# What people call quantizations elsewhere.
_ELSEWHERE = {
    **dict.fromkeys(("q4", "int4", "4bit", "4-bit", "4", "nf4", "fp4"), "q4f16_1, q4f16_k or q4f16_m"),
    **dict.fromkeys(("q3", "int3", "3bit", "3-bit", "3"), "q3f16_1"),
    **dict.fromkeys(("q8", "int8", "8bit", "8-bit", "8", "fp8"), "q8f16_1"),
    **dict.fromkeys(("f16", "fp16", "float16", "bf16", "bfloat16", "half", "16", "f16f16"), "q0f16"),
    **dict.fromkeys(("f32", "fp32", "float32", "none", "32"), "q0f32"),
    **dict.fromkeys(("gptq", "awq"), f"{KEEP} for a checkpoint that has it, or --method gptq or awq"),
}
_ROW_MULTIPLE = 32  # columns; rows that are one group are padded to it, so kernels can read 32 at a time


@dataclass(frozen=True)
class Scheme:
    """How a weight w[N, K] (or [experts, N, K]) is stored.

    `bits == 0` is a plain array `weight` of `model_dtype`. Otherwise runs of `group_size` elements along
    K share a scale s of `model_dtype`; an element is a `bits`-bit code with the value
    (code - zero_point) * s. `codes_per_word` codes fill a uint32, the first in the lowest bits.
    K is padded to a whole group; padding codes are 0 and are never read back. With `group_size == 0` a row
    is one group, padded to a multiple of 32 columns (per-channel quantization).

    Arrays: `q_weight` uint32[N, padded(K) / codes_per_word], `q_scale` model_dtype[N, groups(K)].
    The format is MLC-LLM's group quantization in NK order (mlc_llm/quantization/group_quantization.py), which
    has no per-row groups.

    A scheme with a `zero` is a native format (`native_formats.py`): all codes and signs of scales occur. Runs of 32
    codes fill `bits` words in bit planes. With `super_size` a scale of `model_dtype` is for so many columns, and
    `q_sub` int8[N, K / group_size] multiplies it for each group. With `minima` a minimum follows each scale and each
    sub-scale, and is added: (code - zero) * scale * sub + minimum * sub of the minimum. With a `table` of at most 16
    levels table[code] takes the place of code - zero; the least of them is -zero. Scales are in steps of `unit`, a
    power of two. With a `scale_format` of e8m0 or e4m3 (OCP Microscaling Formats 1.0) `q_scale` has a byte each, int8;
    with bf16 the upper half of a float32, uint16. With `zeros` each group has its own zero point from 0 to 255, the
    bits of `q_zero` int8[N, K / group_size], and `zero` is 0.

    `blocks` names the block format of matrices whose rows are whole blocks; others are stored in this scheme.
    `output` names that of the logits matrix.
    """

    name: str
    model_dtype: str
    bits: int = 0
    group_size: int = 0
    codes_per_word: int = 0
    zero: int | None = None
    super_size: int = 0
    minima: bool = False
    table: tuple[int, ...] = ()
    unit: float = 1.0
    scale_format: str = ""
    zeros: bool = False
    blocks: str = ""
    output: str = ""

    def __post_init__(self) -> None:
        if self.model_dtype not in ("float16", "float32"):
            raise ConfigError(
                "quantization model_dtype",
                where=self.name,
                expected="float16 or float32",
                found=self.model_dtype,
            )
        if self.bits == 0:
            if self.group_size or self.codes_per_word:
                raise ConfigError("quantization without codes has groups", where=self.name)
            return
        if self.kept:
            return
        if not 2 <= self.bits <= 8 or not 0 < self.bits * self.codes_per_word <= 32:
            raise ConfigError(
                "quantization codes do not fit",
                where=self.name,
                expected="2 to 8 bits per code, at most 32 bits per word",
                found=f"{self.codes_per_word} codes of {self.bits} bits",
            )
        group = self.group_size or _ROW_MULTIPLE
        if group < 1 or group % self.codes_per_word:
            raise ConfigError(
                "quantization group does not fill whole words",
                where=self.name,
                expected=f"a multiple of {self.codes_per_word} codes",
                found=group,
            )

    @property
    def zero_point(self) -> int:
        """The code of 0.0: `zero`, or else the largest magnitude of a code: 3, 7, 127 for 3, 4, 8 bits."""
        if self.zero is not None:
            return self.zero
        return (1 << (self.bits - 1)) - 1 if self.bits else 0

    @property
    def kept(self) -> bool:
        """Whether this is a native format of checkpoints: a block format, or integers."""
        return self.zero is not None

    @property
    def mixed(self) -> bool:
        """Whether some matrices are stored in other schemes."""
        return bool(self.blocks or self.output)

    @property
    def blocked(self) -> bool:
        """Whether MLC's formats cannot hold it: bit planes, tables, minima, zero points, sub-scales, large groups."""
        plain = self.bits in (4, 8) and self.group_size in (0, 32) and not self.scale_format
        return self.kept and (not plain or self.minima or self.zeros or self.super_size > 0 or bool(self.table))

    def group(self, k: int) -> int:
        """Columns that share a scale in a row of k elements, including padding; 0 without codes."""
        if self.bits and not self.group_size:
            return -(-k // _ROW_MULTIPLE) * _ROW_MULTIPLE
        return self.group_size

    def groups(self, k: int) -> int:
        """Number of scales in a row of k elements."""
        return -(-k // self.group(k)) if self.bits else 0

    def padded(self, k: int) -> int:
        """Code columns of a row of k elements, including padding."""
        return self.groups(k) * self.group(k)

    def shapes(self, n: int, k: int, experts: int | None = None) -> Shapes:
        """Name -> (shape, dtype) of the packed arrays of w[n, k], or w[experts, n, k]."""
        lead = () if experts is None else (experts,)
        if self.bits == 0:
            return {"weight": ((*lead, n, k), self.model_dtype)}
        words = self.padded(k) * self.bits // 32 if self.kept else self.padded(k) // self.codes_per_word
        each = 2 if self.minima else 1
        scales = each * (k // self.super_size if self.super_size else self.groups(k))
        dtype = {"": self.model_dtype, "bf16": "uint16"}.get(self.scale_format, "int8")
        shapes = {"q_weight": ((*lead, n, words), "uint32"), "q_scale": ((*lead, n, scales), dtype)}
        if self.super_size:
            shapes["q_sub"] = ((*lead, n, each * self.groups(k)), "int8")
        if self.zeros:
            shapes["q_zero"] = ((*lead, n, self.groups(k)), "int8")
        return shapes

    def nbytes(self, n: int, k: int, experts: int | None = None) -> int:
        """Bytes of the packed arrays of w[n, k], or w[experts, n, k]."""
        total = 0
        for shape, dtype in self.shapes(n, k, experts).values():
            count = np.dtype(dtype).itemsize
            for extent in shape:
                count *= extent
            total += count
        return total


def check_shapes(packed: Mapping[str, Array], expected: Shapes, where: str) -> None:
    """Raise CheckpointError unless `packed` has exactly the arrays, shapes and dtypes of `expected`."""
    actual = {key: (tuple(a.shape), a.dtype.name) for key, a in packed.items()}
    if actual != expected:
        raise CheckpointError("packed weight", where=where, expected=expected, found=actual)


@cache
def scheme_names() -> tuple[str, ...]:
    """The names of the scheme files in this package, sorted."""
    names = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(name for name in names if _SCHEME_FILE.fullmatch(name)))


def plain_scheme(dtype: str) -> Scheme:
    """The unquantized scheme of a dtype."""
    return load_scheme({"float16": "q0f16", "float32": "q0f32"}[dtype])


def kv_dtype(name: str) -> str | None:
    """The KV cache's dtype by the users' name: float32, float16, q8 or q4; None is the scheme's dtype.

    Raises ConfigError for another name.
    """
    if name not in _KV_CACHE_DTYPES:
        raise ConfigError("KV cache dtype", expected=", ".join(_KV_CACHE_DTYPES), found=name)
    return _KV_CACHE_DTYPES[name]


def _meant(name: str, known: Sequence[str]) -> str:
    """What an unknown name may stand for."""
    block = re.fullmatch(r"i?q([2-8])_(?:[01]|k(?:_[a-z]+)?|[a-z]+)", name.lower())
    if block:
        bits = {"2": "q3f16_1", "3": "q3f16_1", "4": "q4f16_k"}.get(block[1], "q8f16_1")
        return f"{KEEP} for a GGUF file that has it, or {bits} for other checkpoints"
    return closest(name, known, _ELSEWHERE, f"one such as q4f16_1, q8f16_1 or {KEEP}")


def load_scheme(name: str) -> Scheme:
    """The `SCHEME` of `mlcpipe/quantization/<name>.py`. Raises ConfigError listing the known names.

    `keep` is float32 for vectors: each matrix has its own scheme.
    """
    if name == KEEP:
        return Scheme(KEEP, "float32")
    known = (*scheme_names(), KEEP)
    if name not in known:
        raise ConfigError(
            "unknown quantization",
            expected=_meant(name, (*known, AUTO)),
            found=name,
            next_step="docs/models.md lists all; a recipe.toml is one, too",
        )
    scheme = importlib.import_module(f"{__package__}.{name}").SCHEME
    if not isinstance(scheme, Scheme) or scheme.name != name:
        raise ConfigError("quantization file", where=f"{name}.py", expected=f"a Scheme named {name}", found=scheme)
    return scheme
