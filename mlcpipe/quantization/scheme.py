"""What a quantization scheme is, and how one is found: `<scheme>.py` in this package, by its file name."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.quantization import groups, plain

Array = NDArray[Any]
Shapes = dict[str, tuple[tuple[int, ...], str]]

_SCHEME_FILE = re.compile(r"q\d+f\d+(_\d+)?")
_ROW_MULTIPLE = 32  # columns: a group that is a whole row is padded to it, so that kernels may read 32 at a time


@dataclass(frozen=True)
class Scheme:
    """How a weight w[N, K] (or [experts, N, K]) is stored.

    `bits == 0` is a plain array `weight` of `model_dtype`. Otherwise runs of `group_size` elements along
    K share a scale s of `model_dtype`; an element is a code of `bits` bits and stands for
    (code - zero_point) * s. `codes_per_word` codes fill a uint32, the first in the lowest bits.
    K is padded to a whole group; padding codes are 0 and are never read back. With `group_size == 0` a row
    is one group, padded to a multiple of 32 columns (per-channel quantization).

    Arrays: `q_weight` uint32[N, padded(K) / codes_per_word], `q_scale` model_dtype[N, groups(K)].
    The format is MLC-LLM's group quantization in NK order (mlc_llm/quantization/group_quantization.py), which
    has no whole rows.
    """

    name: str
    model_dtype: str
    bits: int = 0
    group_size: int = 0
    codes_per_word: int = 0

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
        if not 2 <= self.bits <= 8 or not 0 < self.bits * self.codes_per_word <= 32:
            raise ConfigError(
                "quantization codes do not fit",
                where=self.name,
                expected="2 to 8 bits a code, at most 32 bits a word",
                found=f"{self.codes_per_word} codes of {self.bits} bits",
            )
        group = self.group_size or _ROW_MULTIPLE
        if group < 1 or group % self.codes_per_word:
            raise ConfigError(
                "quantization group is not whole words",
                where=self.name,
                expected=f"a multiple of {self.codes_per_word} codes",
                found=group,
            )

    @property
    def zero_point(self) -> int:
        """The code of 0.0, and the largest magnitude in units of the scale: 3, 7, 127 for 3, 4, 8 bits."""
        return (1 << (self.bits - 1)) - 1 if self.bits else 0

    def group(self, k: int) -> int:
        """Columns of a row of k elements that share a scale, padding included; 0 without codes."""
        if self.bits and not self.group_size:
            return -(-k // _ROW_MULTIPLE) * _ROW_MULTIPLE
        return self.group_size

    def groups(self, k: int) -> int:
        """Number of scales of a row of k elements."""
        return -(-k // self.group(k)) if self.bits else 0

    def padded(self, k: int) -> int:
        """Columns of codes that a row of k elements takes."""
        return self.groups(k) * self.group(k)

    def shapes(self, n: int, k: int, experts: int | None = None) -> Shapes:
        """Name -> (shape, dtype) of the packed arrays of w[n, k], or w[experts, n, k]."""
        lead = () if experts is None else (experts,)
        if self.bits == 0:
            return {"weight": ((*lead, n, k), self.model_dtype)}
        return {
            "q_weight": ((*lead, n, self.padded(k) // self.codes_per_word), "uint32"),
            "q_scale": ((*lead, n, self.groups(k)), self.model_dtype),
        }

    def nbytes(self, n: int, k: int, experts: int | None = None) -> int:
        """Bytes of the packed arrays of w[n, k], or w[experts, n, k]."""
        total = 0
        for shape, dtype in self.shapes(n, k, experts).values():
            count = np.dtype(dtype).itemsize
            for extent in shape:
                count *= extent
            total += count
        return total

    def pack(self, w: Array, *, name: str = "weight") -> dict[str, Array]:
        """Pack w float32[N, K] or [experts, N, K] into the arrays of `shapes`. `name` is for messages.

        Rows are done in chunks: besides w and the result it takes a few MB. A plain scheme in the dtype of w
        returns w itself.

        Raises CheckpointError for NaN or infinity, for |w| > 65504 with model_dtype float16, and for an
        array that is empty or has not two or three dimensions.
        """
        rows = self._rows(w, name)
        if self.bits == 0:
            packed = {"weight": plain.pack(rows, self.model_dtype, name)}
        else:
            packed = groups.pack(self, rows, name)
        return {key: a.reshape(*w.shape[:-1], a.shape[-1]) for key, a in packed.items()}

    def unpack(self, packed: Mapping[str, Array], k: int) -> Array:
        """The float32[..., N, k] that packed arrays stand for: (code - zero_point) * scale in float32.

        With a float16 scale that product is exact; a kernel that multiplies in float16 rounds it once more.
        Raises CheckpointError if the arrays are not those of this scheme for rows of k elements.
        """
        first = packed.get("weight" if self.bits == 0 else "q_weight")
        if first is None or first.ndim not in (2, 3):
            raise CheckpointError(
                "packed weight",
                where=self.name,
                expected=f"2 or 3 dimensions, arrays {sorted(self.shapes(1, k))}",
                found=f"arrays {sorted(packed)}",
            )
        experts = first.shape[0] if first.ndim == 3 else None
        check_shapes(packed, self.shapes(first.shape[-2], k, experts), self.name)
        if self.bits == 0:
            return first.astype(np.float32)
        flat = {key: a.reshape(-1, a.shape[-1]) for key, a in packed.items()}
        return groups.unpack(self, flat, k).reshape(*first.shape[:-1], k)

    def error_bound(self, w: Array) -> Array:
        """Elementwise bound, float32 of w's shape, on |w - unpack(pack(w))|; see `groups.error_bound`."""
        rows = self._rows(w, "weight")
        if self.bits == 0:
            bound = plain.error_bound(rows, self.model_dtype)
        else:
            bound = groups.error_bound(self, rows)
        return bound.reshape(w.shape)

    def _rows(self, w: Array, name: str) -> Array:
        """w as [rows, K], a view where w is contiguous."""
        if w.ndim not in (2, 3) or w.size == 0:
            raise CheckpointError(
                f"tensor {name} cannot be quantized to {self.name}",
                expected="[N, K] or [experts, N, K], not empty",
                found=list(w.shape),
            )
        return w.reshape(-1, w.shape[-1])


def check_shapes(packed: Mapping[str, Array], expected: Shapes, where: str) -> None:
    """Raise CheckpointError unless `packed` has exactly the arrays, shapes and dtypes of `expected`."""
    found = {key: (tuple(a.shape), a.dtype.name) for key, a in packed.items()}
    if found != expected:
        raise CheckpointError("packed weight", where=where, expected=expected, found=found)


def scheme_names() -> tuple[str, ...]:
    """The names of the scheme files in this package, sorted."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return tuple(sorted(name for name in found if _SCHEME_FILE.fullmatch(name)))


def plain_scheme(dtype: str) -> Scheme:
    """Numbers of a dtype as they are."""
    return load_scheme({"float16": "q0f16", "float32": "q0f32"}[dtype])


def load_scheme(name: str) -> Scheme:
    """The `SCHEME` of `mlcpipe/quantization/<name>.py`. Raises ConfigError that lists the known names."""
    known = scheme_names()
    if name not in known:
        raise ConfigError(
            "unknown quantization",
            expected=" ".join(known),
            found=name,
            next_step="choose one of these",
        )
    scheme = importlib.import_module(f"{__package__}.{name}").SCHEME
    if not isinstance(scheme, Scheme) or scheme.name != name:
        raise ConfigError("quantization file", where=f"{name}.py", expected=f"a Scheme named {name}", found=scheme)
    return scheme
