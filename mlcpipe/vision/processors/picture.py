"""A picture, made ready for a tower."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.model_info import VisionInfo

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
_ROW_BITS = 20  # of a row's number in the id that stands for it


@dataclass(frozen=True, eq=False)
class Picture:
    """Its `tiles` uint8 [height, width, 3], each of one call of the tower, and its `layout` in a prompt: texts, and the
    number of the tower's rows between them. A tile of a video is [frames, height, width, 3].

    `counts` are the rows of each tile, by default `info.rows`. `positions` i32[3, rows] are where RoPE has the rows,
    after the position of the first one, and `advance` is how many positions they take; None: as if they were text.
    `held`: of the rows and columns of the last tile's patches those that are not padding, where it has some.
    """

    info: VisionInfo
    tiles: tuple[NDArray[np.uint8], ...]
    layout: tuple[str | int, ...]
    counts: tuple[int, ...] = ()
    positions: Ints | None = None
    advance: int = 0
    held: tuple[int, ...] = ()

    @cached_property
    def number(self) -> int:
        """128 bits of a hash of its pixels and their sizes: equal for equal pictures, whatever they were read from."""
        found = hashlib.sha256(repr([*(tile.shape for tile in self.tiles), *self.held]).encode())
        for tile in self.tiles:
            found.update(np.ascontiguousarray(tile).data)
        return int.from_bytes(found.digest()[:16], "little")

    @cached_property
    def _ends(self) -> list[int]:
        """The end of each tile among all rows."""
        return list(accumulate(self.counts or [self.info.rows] * len(self.tiles)))

    def tile_of(self, row: int) -> tuple[int, int]:
        """The tile that a row is of, and the number of the row in it."""
        tile = bisect_right(self._ends, row)
        return tile, row - (self._ends[tile - 1] if tile else 0)

    @property
    def rows(self) -> int:
        """Rows that stand for it in a prompt."""
        return sum(part for part in self.layout if isinstance(part, int))

    def id_of(self, row: int) -> int:
        """What stands for a row among a prompt's tokens: a negative number, of this picture and row alone."""
        return ~(self.number << _ROW_BITS | row)


def picture_row(token: int) -> tuple[int, int]:
    """The number of the picture and the row that a negative token stands for."""
    return ~token >> _ROW_BITS, ~token & (1 << _ROW_BITS) - 1


def last_keys(tokens: Sequence[int], begin: int, count: int) -> Ints:
    """The last position that each of `count` tokens from `begin` on sees, i32[count]: its own, or of a picture whose
    rows see each other the last one of these tokens.
    """
    found: Ints = np.arange(begin, begin + count, dtype=np.int32)
    for index in range(count - 2, -1, -1):
        if _together(tokens, begin + index + 1):
            found[index] = found[index + 1]
    return found


def _together(tokens: Sequence[int], at: int) -> bool:
    """Whether the tokens before and at an index stand for rows of one picture: a shifted context joins two."""
    before, token = tokens[at - 1], tokens[at]
    return token < before < 0 and before ^ token < 1 << _ROW_BITS


def whole_pictures(tokens: Sequence[int], begin: int, end: int, most: int) -> int:
    """`end`, where tokens[begin:end] cut no picture. Else the end of those before it, of the picture if there are
    none, and `begin` if that is beyond `most`.
    """
    if end <= begin or end >= len(tokens) or not _together(tokens, end):
        return end
    first = end - 1
    while first > begin and _together(tokens, first):
        first -= 1
    if first > begin:
        return first
    last = end + 1
    while last < len(tokens) and _together(tokens, last):
        last += 1
    return last if last <= most else begin


def ids_of(tokens: list[int], pictures: Sequence[Picture]) -> list[int]:
    """A prompt's tokens of the vocabulary: those of pictures are the token that stands for one."""
    return [token if token >= 0 else pictures[0].info.token for token in tokens] if pictures else tokens


def normalized(pixels: NDArray[np.uint8], mean: Any, std: Any, *, fused: bool = False) -> Floats:
    """pixels uint8 [..., 3] -> f32, (pixels / 255 - mean) / std by channel, rounded as transformers rounds it.

    `fused`: (pixels - 255 mean) / (255 std), as its processors of torch do.
    """
    unit = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.asarray(one, np.float32) for one in (mean, std))
    if fused:
        unit, mean, std = np.arange(256, dtype=np.float32), mean * np.float32(255), std * np.float32(255)
    table: Sequence[Floats] = [(unit - m) / s for m, s in zip(mean, std)]
    return np.stack([one[pixels[..., channel]] for channel, one in enumerate(table)], axis=-1)
