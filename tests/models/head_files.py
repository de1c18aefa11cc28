"""Medusa heads of random numbers, in the files that their authors write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Tensors = dict[str, NDArray[Any]]
HEADS = 3


def random_heads(vocab: int, hidden: int = 64, blocks: int = 1) -> Tensors:
    """Of `HEADS` heads."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for block in range(blocks):
            shapes |= {f"{head}.{block}.linear.weight": (hidden, hidden), f"{head}.{block}.linear.bias": (hidden,)}
        shapes[f"{head}.{blocks}.weight"] = vocab, hidden
    return {name: rng.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}


def write_heads(folder: Path, tensors: Tensors) -> Path:
    """The folder, with heads in it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder
