"""Damaged files of saved pages, most of them with the hash of what they became: else nothing but the hash is read."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from mlcpipe.runtime.chat_file import read_chat
from tests.chat_files import DIGEST, HEADER, by_hand, sealed
from tests.fuzz import findings
from tests.fuzz.gguf_files import damaged
from tests.unit.bundle.conftest import small_manifest

TOKENS = 32
NAME = "saved.chat"


def write(folder: Path) -> None:
    """A whole file."""
    (folder / NAME).write_bytes(by_hand(small_manifest((), {}), TOKENS))


def read(folder: Path) -> None:
    """Everything in a file. Raises MlcpipeError where it is refused."""
    for units in read_chat(folder / NAME, small_manifest((), {}), 256).states:
        units.sum()


def fuzz(source: Path, folder: Path, seeds: Iterable[int], seconds: float) -> list[str]:
    """The findings of `seeds`, until `seconds` have passed, each with its seed; the file stays in `folder`."""
    content = (source / NAME).read_bytes()[:-DIGEST]
    places = [*range(HEADER), *range(HEADER), *range(HEADER + 4 * TOKENS + 200)]

    def make(seed: int) -> None:
        draw = random.Random(seed)
        case = damaged(draw, content, places)
        (folder / NAME).write_bytes(sealed(case) if draw.random() < 0.95 else case)

    return findings.fuzz(make, lambda: read(folder), seeds, seconds)
