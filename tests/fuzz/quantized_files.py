"""Damaged quantized checkpoints, adapters and draft heads: each seed damages the settings, the header or the data of a small valid one."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.matrix import Matrix
from tests.fuzz import findings
from tests.fuzz.mutate import damage_bytes, damage_json

_SHAPES = (0, 1, 2, 3, 7, 31, 32, 64, 255, 256, 2**16, 2**24, 2**31, 2**40)


def _damage(draw: random.Random, config: bytes, weights: bytes) -> tuple[bytes, bytes]:
    """config.json and model.safetensors with one kind of damage."""
    (size,) = struct.unpack("<Q", weights[:8])
    header, data = weights[8 : 8 + size], weights[8 + size :]
    kind = draw.random()
    if kind < 0.4:
        return json.dumps(damage_json(draw, json.loads(config))).encode(), weights
    if kind < 0.8:
        fields = json.loads(header)
        if draw.random() < 0.5:
            fields = damage_json(draw, fields)
        else:  # shapes with as many elements, which a header may have
            tensor = fields[draw.choice([name for name in fields if name != "__metadata__"])]
            tensor["shape"] = draw.choice((tensor["shape"][::-1], [*tensor["shape"], 1], [1, *tensor["shape"]],
                                           [draw.choice(_SHAPES), 0]))  # fmt: skip
            if draw.random() < 0.3:
                tensor["dtype"] = draw.choice(("I32", "F32", "U32", "F16", "BF16", "I8", "U8", "F8_E4M3"))
        header = json.dumps(fields).encode()
    else:
        data = damage_bytes(draw, data)
    return config, struct.pack("<Q", len(header)) + header + data


def open_all(folder: Path) -> None:
    """Everything that a compile reads of a checkpoint. Raises MlcpipeError where it is refused."""
    read_all(open_checkpoint(folder))


def read_all(checkpoint: Checkpoint) -> None:
    """Every tensor. Raises MlcpipeError."""
    for name, tensor in checkpoint.tensors.items():
        checkpoint.read(name)
        if isinstance(tensor, Matrix):
            checkpoint.read_parts(name)


@dataclass(frozen=True)
class Parser:
    """`write` makes a valid folder, whose files of these names are damaged, and `read` reads all of it."""

    write: Callable[[Path], object]
    read: Callable[[Path], None] = open_all
    config: str = "config.json"
    weights: str = "model.safetensors"

    def fuzz(self, source: Path, folder: Path, seeds: Iterable[int], seconds: float) -> list[str]:
        """The findings of `seeds`, until `seconds` have passed, each with its seed; the last case stays in `folder`."""
        names = self.config, self.weights
        config, weights = ((source / name).read_bytes() for name in names)

        def make(seed: int) -> None:
            for name, content in zip(names, _damage(random.Random(seed), config, weights)):
                (folder / name).write_bytes(content)

        return findings.fuzz(make, lambda: self.read(folder), seeds, seconds)
