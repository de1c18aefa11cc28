"""Tensors that several stored ones make up, or one in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import ConfigError
from mlcpipe.support.json_files import shown, shown_path

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MadeTensor(TensorInfo):
    """`make` gives the numbers of `shape`, in its order, of those of `parts`; `nbytes` are those of all of them."""

    parts: tuple[TensorInfo, ...]
    make: Callable[[Sequence[Floats]], Floats]


def joined(name: str, parts: Sequence[TensorInfo]) -> MadeTensor:
    """The rows of the parts, one part after the other."""
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return _made(name, shape, parts, lambda values: np.concatenate([*values]))


def framed(name: str, parts: Sequence[TensorInfo]) -> MadeTensor:
    """Convolutions [n, channels, rows, columns] of each frame -> [n, channels * frames * rows * columns]."""
    shape = (parts[0].shape[0], len(parts) * math.prod(parts[0].shape[1:]))
    return _made(name, shape, parts, lambda values: np.stack([*values], axis=2), rank=4)


def channels_last(name: str, part: TensorInfo) -> MadeTensor:
    """A convolution [n, channels, rows, columns] -> [n, rows * columns * channels]."""
    shape = (part.shape[0], math.prod(part.shape[1:]))
    return _made(name, shape, [part], lambda values: np.moveaxis(values[0], 1, 3), rank=4)


def _made(
    name: str, shape: tuple[int, ...], parts: Sequence[TensorInfo], make: Callable[[Sequence[Any]], Any], rank: int = 0
) -> MadeTensor:
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:] or (rank and (len(part.shape) != rank or part.shape != first.shape)):
            expected = f"rank {rank}, and the shape of each part" if rank else "the columns of each part"
            raise ConfigError(
                f"tensor {shown(part.name)}", where=shown_path(part.file), expected=expected, found=list(part.shape)
            )
    nbytes = sum(part.nbytes for part in parts)
    return MadeTensor(name, shape, first.dtype, first.file, first.offset, nbytes, tuple(parts), make)
