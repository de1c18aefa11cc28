"""Draw pictures for `sight.py` into files that it maps into memory: `python apps/demo_model/sight_data.py FOLDER`.

A worker draws `--count` pictures into a file of its own; several may run at once with other seeds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pictures
from numpy.typing import NDArray
from PIL import Image

SIDE, PATCH, GRID = 48, 8, 3
KINDS, NAMES = (*pictures.SHAPES, *pictures.DIGITS), tuple(pictures.COLOURS)
SIDES = (48, 96, 96, 144)
MOST = 3


def pixels_of(image: Image.Image) -> NDArray[np.uint8]:
    """u8[48, 48, 3]: the picture, resized as SmolVLM's processor does it."""
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def labels_of(things: tuple[pictures.Thing, ...]) -> NDArray[np.float32]:
    """f32[3, 4]: kind, colour, x and y of each thing from left to right, -1 where there is none."""
    labels = np.full((MOST, 4), -1, np.float32)
    for i, t in enumerate(things):
        labels[i] = KINDS.index(t.kind), NAMES.index(t.colour), t.x, t.y
    return labels


def things_of(labels: Sequence[Sequence[float]]) -> tuple[pictures.Thing, ...]:
    """The things that `labels_of` had, without their sizes."""
    return tuple(pictures.Thing(KINDS[int(k)], NAMES[int(c)], x, y, 0) for k, c, x, y in labels if k >= 0)


def draw(rng: random.Random, count: int, held_out: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Pictures u8[N, 48, 48, 3] and their labels f32[N, 3, 4]."""
    pixels, labels = np.empty((count, SIDE, SIDE, 3), np.uint8), np.empty((count, MOST, 4), np.float32)
    for i in range(count):
        scene = pictures.draw_scene(rng, rng.choice(SIDES), held_out=held_out)
        pixels[i], labels[i] = pixels_of(scene.image), labels_of(scene.things)
    return pixels, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    for seed in a.seeds:
        pixels, labels = draw(random.Random(seed), a.count)
        part = a.folder / f"{seed}.part"
        with part.open("wb") as file:
            np.savez(file, pixels=pixels, labels=labels)
        part.replace(a.folder / f"{seed}.npz")
        print(seed, flush=True)


if __name__ == "__main__":
    main()
