"""The parts of a quantized matrix: codes, scales and sub-scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Parts:
    """Of a matrix [N, K]: codes u8[N, K] and scales f16, f32 or, for bfloat16, u16[N, groups].

    In formats with minima a minimum, added to the product, follows each scale and each sub-scale. Scales of MXFP4 and
    NVFP4 are their bytes, i8; -1 is NaN. `subs` are i8[N, sub-groups], sub-scales of the scales, or the bits of zero
    points i8[N, groups] from 0 to 255.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    subs: NDArray[np.int8] | None = None

    @property
    def finite(self) -> bool:
        """Whether all scales are numbers."""
        if self.scales.dtype == np.int8:
            return bool((self.scales != -1).all())
        return bool(np.isfinite(widened(self.scales)).all())

    def map(self, change: Callable[[Array], Array]) -> Parts:
        """The parts, each mapped by `change`."""
        return Parts(change(self.codes), change(self.scales), None if self.subs is None else change(self.subs))


def widened(scales: Array) -> Array:
    """Scales as float32; uint16 are bfloat16."""
    if scales.dtype == np.uint16:
        return (scales.astype(np.uint32) << 16).view(np.float32)
    return scales.astype(np.float32)


def joined(parts: Sequence[Parts]) -> Parts:
    """One matrix with the rows of several, in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    subs = None if first.subs is None else np.concatenate([part.subs for part in parts if part.subs is not None])
    return Parts(np.concatenate([p.codes for p in parts]), np.concatenate([p.scales for p in parts]), subs)
