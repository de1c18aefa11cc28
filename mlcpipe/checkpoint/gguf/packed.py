"""GGUF's blocks taken apart: codes, scales and minima as the file has them.

Each function takes blocks u8[n, bytes] and returns the parts of n rows of one block. Minima that llama.cpp subtracts
change their sign: ours are added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.gguf.fields import Bytes, bit_fields, words
from mlcpipe.checkpoint.parts import Parts


def _halves(b: Bytes, at: int, count: int = 1) -> NDArray[np.float16]:
    return words(b[:, at : at + 2 * count], "<f2")


def _q4_0(b: Bytes) -> Parts:
    return Parts(bit_fields(b[:, 2:], 4, 16), _halves(b, 0))


def _q8_0(b: Bytes) -> Parts:
    return Parts(b[:, 2:] ^ np.uint8(128), _halves(b, 0))


PARTS: Mapping[str, Callable[[Bytes], Parts]] = {"Q4_0": _q4_0, "Q8_0": _q8_0}
