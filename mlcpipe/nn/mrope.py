"""Multimodal RoPE (Qwen2-VL, Wang et al. 2024): which of three positions turns each pair of a head.

The positions are time, row and column. Those of text are equal, so all layouts are ordinary RoPE for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields, rope_table

Layout = Callable[[int], tuple[int, ...]]  # the number of pairs -> the position of each: 0 time, 1 row, 2 column


def sections(text: Mapping[str, Any], default: Sequence[int]) -> tuple[int, int, int]:
    """The pairs of time, row and column that a `text_config` states. Raises ConfigError."""
    stated = rope_table(Fields(text, "config.json text_config")).get("mrope_section", list(default))
    good = isinstance(stated, list) and len(stated) == 3
    if not good or any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= 1024 for one in stated):
        raise ConfigError("field mrope_section", where="config.json", expected="three numbers of pairs", found=stated)
    time, row, column = stated
    return time, row, column


def interleaved(of: tuple[int, int, int]) -> Layout:
    """Pairs 1, 4, 7 … take the row and 2, 5, 8 … the column, as many as their sections say; the others take the time.

    As Qwen3-VL has it (transformers' `Qwen3VLTextRotaryEmbedding.recomposition_frequencies`).
    """

    def layout(pairs: int) -> tuple[int, ...]:
        return tuple(pair % 3 if pair < 3 * of[pair % 3] else 0 for pair in range(pairs))

    return layout


def sectioned(of: tuple[int, int, int]) -> Layout:
    """The first section takes the time, the next one the row, the last one the column, as Qwen2-VL has it."""

    def layout(pairs: int) -> tuple[int, ...]:
        axes = [axis for axis, count in enumerate(of) for _ in range(count)]
        if len(axes) != pairs:
            raise ConfigError("field mrope_section", where="config.json", expected=f"{pairs} pairs", found=len(axes))
        return tuple(axes)

    return layout
