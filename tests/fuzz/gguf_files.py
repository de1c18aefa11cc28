"""Damaged GGUF files: each seed makes one from a small valid file, most of them with damage in the header's structure."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.gguf.header import read_header
from mlcpipe.checkpoint.gguf.vocabulary import tokenizer_files
from tests.fuzz import findings

_WORDS = (0, 1, 2, 3, 7, 8, 9, 13, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def damaged(draw: random.Random, content: bytes, places: Sequence[int]) -> bytes:
    """A copy with one to four edits; `places` are offsets of the header's structure."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.choice(places) if draw.random() < 0.8 else draw.randrange(len(content))
        if not raw:
            break
        at = min(at, len(raw) - 1)
        kind = draw.randrange(8)
        if kind < 2:
            raw[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, raw[at] ^ 1 << draw.randrange(8)))
        elif kind < 4:
            raw[at : at + 8] = struct.pack("<Q", draw.choice(_WORDS))
        elif kind == 4:
            raw[at : at + 4] = struct.pack("<I", draw.choice(_WORDS) & 0xFFFFFFFF)
        elif kind == 5:
            del raw[at : at + draw.choice((1, 4, 8, 64, len(raw)))]
        elif kind == 6:
            raw[at:at] = raw[draw.choice(places) :][: draw.choice((1, 8, 200))]
        else:
            raw[at : at + 2] = struct.pack("<e", draw.choice((float("nan"), float("inf"), 6e4, 1e-7)))
    return bytes(raw) or b"\0"


def places_of(path: Path) -> list[int]:
    """Offsets of lengths, types, values and names: keys with what follows them, and the list of tensors."""
    content, header = path.read_bytes(), read_header(path)
    found = [*range(24)]
    for key in header.metadata.values:
        at = content.index(key.encode()) - 8
        found += range(at, at + len(key) + 32)
    first = min(content.index(struct.pack("<Q", len(one.name)) + one.name.encode()) for one in header.tensors)
    start = header.tensors[0].offset
    return [*found, *range(first, start), *range(first, start)]


def open_all(path: Path) -> None:
    """Everything that a compile reads of a file. Raises MlcpipeError where it is refused."""
    checkpoint = open_checkpoint(path)
    tokenizer_files(checkpoint.metadata)  # type: ignore[attr-defined]
    for name in checkpoint.tensors:
        checkpoint.read(name)


def fuzz(source: Path, folder: Path, seeds: Iterable[int], seconds: float) -> list[str]:
    """The findings of `seeds`, until `seconds` have passed, each with its seed; the file stays in `folder`."""
    content, places, path = source.read_bytes(), places_of(source), folder / "case.gguf"

    def make(seed: int) -> None:
        path.write_bytes(damaged(random.Random(seed), content, places))

    return findings.fuzz(make, lambda: open_all(path), seeds, seconds)
