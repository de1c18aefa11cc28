"""Device-specific orders of packed weights: named re-packings, each with an inverse.

`row` is MLC's order: an array [..., N, X] as the scheme packs it, X along K.
`rows16` is for CPUs with 16 float32 lanes: blocks of 16 interleaved rows,
[..., ceil(N/16), X, 16]. One vector load reads the same word (or scale, or number) of 16 rows. Padding rows of the
last block have codes and scales 0 (plain weights: 0.0), so they decode to 0. Sub-scales and zero points, one byte each,
are uint32[..., ceil(N/16), X, 4]: the bytes of 16 rows side by side; scales in bfloat16 are uint32[..., X, 8].
`rows32_pairs` is for GPUs that may lack float16: 32 adjacent invocations read one word of each of 32 rows. Two
consecutive float16 numbers of a row form one uint32, the first in its lower half; odd rows are padded with 0.0.
Blocks are as in `rows16`, with 32 rows.
`row_words` is for rows that hosts gather: `row`, where numbers of 1 and 2 bytes fill uint32 along K, the first in the
lowest bits; the last word is padded with 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import ConfigError
from mlcpipe.quantization.scheme import Scheme, Shapes, check_shapes

Array = NDArray[Any]

_WORD_PARTS = {"int8": 4, "uint16": 2}  # of a uint32 that rows side by side share


@dataclass(frozen=True)
class Layout:
    """An order of packed arrays. `lanes` rows are interleaved; 0 is row-major.

    With `pairs` a float16 array is stored as uint32 with half as many columns.
    """

    name: str
    lanes: int = 0
    pairs: bool = False

    def shapes(self, scheme: Scheme, n: int, k: int, experts: int | None = None) -> Shapes:
        """Name -> (shape, dtype) of the arrays in this layout, of a weight [n, k] or [experts, n, k]."""
        return {name: self._stored(shape, dtype) for name, (shape, dtype) in scheme.shapes(n, k, experts).items()}

    def _stored(self, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], str]:
        if self.pairs and dtype == "float16":
            shape, dtype = (*shape[:-1], -(-shape[-1] // 2)), "uint32"
        if self.words and dtype in _WORD_PARTS:
            shape, dtype = (*shape[:-1], -(-shape[-1] // _WORD_PARTS[dtype])), "uint32"
        extents = self._extents(shape[-2], shape[-1])
        if self.lanes and dtype in _WORD_PARTS:
            return (*shape[:-2], *extents[:-1], self.lanes // _WORD_PARTS[dtype]), "uint32"
        return (*shape[:-2], *extents), dtype

    @property
    def words(self) -> bool:
        """Whether a row is whole words."""
        return self.pairs and not self.lanes

    def vector_dtype(self, model_dtype: str) -> str:
        """The dtype in which vectors (norms, biases) are stored."""
        return "float32" if self.pairs else model_dtype

    def locate(self, row: Any, column: Any) -> tuple[Any, ...]:
        """The index here of element [row, column] in row order: ints or TVM expressions."""
        if self.lanes == 0:
            return (row, column)
        return (row // self.lanes, column, row % self.lanes)

    def repack(self, scheme: Scheme, packed: Mapping[str, Array], n: int, k: int) -> dict[str, Array]:
        """Arrays in row order -> arrays in this layout; allocates only the result.

        Raises CheckpointError if the arrays do not match `scheme` for [n, k] or [experts, n, k].
        """
        check_shapes(packed, scheme.shapes(n, k, _experts(packed, 2)), f"{scheme.name} row")
        stored = {name: _paired(a) for name, a in packed.items()} if self.pairs else dict(packed)
        if self.words:
            stored = {name: _words(_padded(a, _WORD_PARTS.get(a.dtype.name, 1))) for name, a in stored.items()}
        return stored if self.lanes == 0 else {name: _words(self._interleave(a)) for name, a in stored.items()}

    def unrepack(self, scheme: Scheme, packed: Mapping[str, Array], n: int, k: int) -> dict[str, Array]:
        """The inverse of `repack`; padding rows are dropped."""
        lead = _experts(packed, 3 if self.lanes else 2)
        check_shapes(packed, self.shapes(scheme, n, k, lead), f"{scheme.name} {self.name}")
        known = scheme.shapes(n, k, lead)
        if self.lanes == 0:
            parts = {name: known[name] for name in packed if known[name][1] in _WORD_PARTS and self.words}
            rows = {**packed, **{name: packed[name].view(d)[..., : shape[-1]] for name, (shape, d) in parts.items()}}
        else:
            narrow = {
                name: a.view(known[name][1]) if known[name][1] in _WORD_PARTS else a for name, a in packed.items()
            }
            rows = {name: self._separate(a, n) for name, a in narrow.items()}
        if not self.pairs:
            return rows
        return {
            name: _unpaired(a, known[name][0][-1]) if known[name][1] == "float16" else a for name, a in rows.items()
        }

    def _extents(self, n: int, x: int) -> tuple[int, ...]:
        return (n, x) if self.lanes == 0 else (-(-n // self.lanes), x, self.lanes)

    def _interleave(self, a: Array) -> Array:
        """[..., N, X] -> [..., ceil(N / lanes), X, lanes]."""
        n, x = a.shape[-2:]
        whole = n // self.lanes
        out = np.zeros((*a.shape[:-2], *self._extents(n, x)), a.dtype)
        blocks = a[..., : whole * self.lanes, :].reshape(*a.shape[:-2], whole, self.lanes, x)
        out[..., :whole, :, :] = np.swapaxes(blocks, -1, -2)
        rest = n - whole * self.lanes
        if rest:
            out[..., whole, :, :rest] = np.swapaxes(a[..., whole * self.lanes :, :], -1, -2)
        return out

    def _separate(self, a: Array, n: int) -> Array:
        """[..., blocks, X, lanes] -> [..., n, X]."""
        x = a.shape[-2]
        whole = n // self.lanes
        out = np.empty((*a.shape[:-3], n, x), a.dtype)
        for block in range(whole):
            out[..., block * self.lanes : (block + 1) * self.lanes, :] = np.swapaxes(a[..., block, :, :], -1, -2)
        rest = n - whole * self.lanes
        if rest:
            out[..., whole * self.lanes :, :] = np.swapaxes(a[..., whole, :, :rest], -1, -2)
        return out


def _words(a: Array) -> Array:
    """int8[..., 4 n] -> uint32[..., n], uint16[..., 2 n] -> uint32[..., n]; other dtypes unchanged."""
    return a.view("<u4") if a.dtype.name in _WORD_PARTS else a


def _paired(a: Array) -> Array:
    """float16[..., X] -> uint32[..., ceil(X / 2)]; other dtypes unchanged."""
    if a.dtype != np.float16:
        return a
    return np.ascontiguousarray(_padded(a, 2)).view("<u4")


def _padded(a: Array, multiple: int) -> Array:
    """[..., X], with zeros up to a multiple of columns."""
    missing = -a.shape[-1] % multiple
    return np.concatenate([a, np.zeros((*a.shape[:-1], missing), a.dtype)], axis=-1) if missing else a


def _unpaired(a: Array, columns: int) -> Array:
    """uint32[..., ceil(X / 2)] -> float16[..., X]."""
    return np.ascontiguousarray(a.view("<f2")[..., :columns])


def _experts(packed: Mapping[str, Array], dims: int) -> int | None:
    """The leading extent of arrays with `dims` + 1 dimensions, else None."""
    for array in packed.values():
        return int(array.shape[0]) if array.ndim == dims + 1 else None
    return None


_LAYOUTS = (
    Layout("row"),
    Layout("rows16", lanes=16),
    Layout("rows32_pairs", lanes=32, pairs=True),
    Layout("row_words", pairs=True),
)


def layout_names() -> tuple[str, ...]:
    """The names that `load_layout` accepts."""
    return tuple(layout.name for layout in _LAYOUTS)


def load_layout(name: str) -> Layout:
    """The layout with this name. Raises ConfigError listing the known names."""
    for layout in _LAYOUTS:
        if layout.name == name:
            return layout
    raise ConfigError("unknown weight layout", expected=" ".join(layout_names()), found=name)
