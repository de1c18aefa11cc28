"""Draw pictures of shapes and digits, for the training and the tests of the demo model that sees. Needs Pillow alone.

A picture has one to three things on a light background. `HELD_OUT` are pairs of colour and kind that training never
draws. Run as a program, it draws `examples/shapes.png`.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]
COLOURS: dict[str, RGB] = {
    "red": (220, 30, 35), "yellow": (250, 215, 30), "green": (30, 150, 60),
    "blue": (30, 80, 220), "purple": (130, 45, 165), "black": (15, 15, 18),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star")
DIGITS = tuple("0123456789")
# Fonts by the names of their files, which Pillow looks for among the system's.
FONTS = tuple(f"DejaVu{name}.ttf" for name in (
    "Sans", "Sans-Bold", "Sans-Oblique", "Sans-ExtraLight", "SansCondensed", "SansCondensed-Bold", "SansMono-Bold",
    "Serif", "Serif-Bold", "Serif-Italic", "SerifCondensed", "SerifCondensed-Bold",
))  # fmt: skip
BACKGROUNDS = ("plain", "gradient", "noise", "stripes")
# Pillow's own font, Aileron, is part of it: every machine draws it alike.
HELD_OUT_FONT, HELD_OUT_BACKGROUND = "", "checks"
# Of each kind, the colour that training never draws it in.
HELD_OUT = frozenset((tuple(COLOURS)[i % 6], kind) for i, kind in enumerate((*SHAPES, *DIGITS)))
# Digits as lines in a box of 1 x 1, as a pen writes them.
_LINES: dict[str, tuple[tuple[float, float], ...]] = {
    "0": tuple((0.5 + 0.4 * math.sin(a * math.tau / 14), 0.5 - 0.5 * math.cos(a * math.tau / 14)) for a in range(16)),
    "1": ((0.3, 0.25), (0.58, 0.0), (0.58, 1.0)),
    "2": ((0.1, 0.25), (0.2, 0.07), (0.5, 0), (0.8, 0.1), (0.87, 0.3), (0.7, 0.52), (0.1, 1), (0.9, 1)),
    "3": ((0.12, 0.1), (0.5, 0), (0.82, 0.12), (0.82, 0.36), (0.45, 0.47), (0.85, 0.6), (0.88, 0.82), (0.5, 1),
          (0.1, 0.88)),
    "4": ((0.7, 1), (0.7, 0), (0.08, 0.7), (0.95, 0.7)),
    "5": ((0.85, 0), (0.22, 0), (0.15, 0.45), (0.5, 0.36), (0.85, 0.5), (0.88, 0.8), (0.5, 1), (0.1, 0.88)),
    "6": ((0.78, 0.05), (0.4, 0.12), (0.14, 0.5), (0.14, 0.8), (0.45, 1), (0.8, 0.9), (0.87, 0.65), (0.6, 0.42),
          (0.2, 0.58)),
    "7": ((0.08, 0), (0.92, 0), (0.4, 1)),
    "8": ((0.5, 0.46), (0.18, 0.3), (0.25, 0.06), (0.5, 0), (0.75, 0.06), (0.82, 0.3), (0.5, 0.46), (0.12, 0.65),
          (0.14, 0.9), (0.5, 1), (0.86, 0.9), (0.88, 0.65), (0.5, 0.46)),
    "9": ((0.22, 0.95), (0.6, 0.88), (0.86, 0.5), (0.86, 0.2), (0.55, 0), (0.2, 0.1), (0.13, 0.35), (0.4, 0.58),
          (0.8, 0.42)),
}  # fmt: skip


@dataclass(frozen=True)
class Thing:
    """A shape or a digit; its centre and size are shares of the picture's side."""

    kind: str
    colour: str
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Scene:
    """Things from left to right, and their picture."""

    things: tuple[Thing, ...]
    image: Image.Image


def draw_scene(rng: random.Random, side: int, *, held_out: bool = False, new_style: bool = False) -> Scene:
    """A square picture of `side` pixels, of pairs that are new to the model if they are held out.

    With `new_style`, so are the font and half of the backgrounds.
    """
    kinds = _kinds(rng)
    things = []
    for kind, (x, y, size) in zip(kinds, _places(rng, len(kinds))):
        while True:
            colour = rng.choice(tuple(COLOURS))
            if ((colour, kind) in HELD_OUT) == held_out:
                break
        things.append(Thing(kind, colour, x, y, size))
    return _draw(rng, things, _background(rng, side, new_style), new_style)


def example() -> Scene:
    """`examples/shapes.png`: three pairs that training never draws."""
    rng, side = random.Random(1), 192
    things = (Thing("circle", "red", 0.22, 0.4, 0.34), Thing("star", "blue", 0.52, 0.7, 0.36),
              Thing("7", "black", 0.78, 0.32, 0.38))  # fmt: skip
    return _draw(rng, things, Image.new("RGB", (side, side), (250, 250, 250)), new_style=True)


def _draw(rng: random.Random, things: Sequence[Thing], image: Image.Image, new_style: bool) -> Scene:
    for thing in things:
        mask = _mask(rng, thing, image.width, new_style)
        image.paste(_varied(rng, COLOURS[thing.colour], 14), (0, 0), mask)
    return Scene(tuple(sorted(things, key=lambda t: t.x)), image)


def _kinds(rng: random.Random) -> list[str]:
    """What is in a picture; of each kind there is one."""
    digits, shapes = rng.choices(((0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)), (5, 8, 12, 20, 27, 28))[0]
    return rng.sample(DIGITS, digits) + rng.sample(SHAPES, shapes)


def _places(rng: random.Random, count: int) -> list[tuple[float, float, float]]:
    """(x, y, size) of so many things that do not touch, none of which is right below another."""
    low, high = ((0.4, 0.8), (0.32, 0.46), (0.3, 0.38))[count - 1]
    while True:
        placed: list[tuple[float, float, float]] = []
        for _ in range(count):
            size = rng.uniform(low, high)
            x, y = (rng.uniform(size / 2 + 0.04, 0.96 - size / 2) for _ in range(2))
            placed.append((x, y, size))
        apart = all(
            math.hypot(a[0] - b[0], a[1] - b[1]) > 0.56 * (a[2] + b[2]) and abs(a[0] - b[0]) > 0.16
            for i, a in enumerate(placed) for b in placed[:i]
        )  # fmt: skip
        if apart:
            return placed


def _varied(rng: random.Random, colour: RGB, by: int) -> RGB:
    red, green, blue = (min(255, max(0, part + rng.randint(-by, by))) for part in colour)
    return red, green, blue


def _background(rng: random.Random, side: int, new_style: bool) -> Image.Image:
    """A light background."""
    kind = HELD_OUT_BACKGROUND if new_style and rng.random() < 0.5 else rng.choice(BACKGROUNDS)
    one = _varied(rng, rng.choice(((250, 250, 250), (235, 235, 235))), 15)
    image = Image.new("RGB", (side, side), one)
    other = _varied(rng, (225, 225, 225), 25)
    if kind == "gradient":
        ramp = Image.linear_gradient("L").resize((side, side)).rotate(rng.choice((0, 90, 180, 270)))
        image.paste(other, (0, 0), ramp)
    elif kind == "noise":
        left, top = rng.randint(0, 256), rng.randint(0, 256)
        ramp = _noise(rng.randint(3, 6)).crop((left, top, left + side, top + side))
        image.paste(other, (0, 0), ramp)
    elif kind in ("stripes", HELD_OUT_BACKGROUND):
        draw, step = ImageDraw.Draw(image), max(2, int(side * rng.uniform(0.06, 0.2)))
        across = rng.random() < 0.5
        for row, at in enumerate(range(0, side, step)):
            if kind == "stripes" and row % 2:
                box = (at, 0, at + step, side) if across else (0, at, side, at + step)
                draw.rectangle(box, other)
            elif kind == HELD_OUT_BACKGROUND:
                for column in range(row % 2 * step, side, 2 * step):
                    draw.rectangle((column, at, column + step, at + step), other)
    return image


@functools.cache
def _noise(tens: int) -> Image.Image:
    """L[512, 512] of a deviation of so many tens."""
    return Image.effect_noise((512, 512), 10.0 * tens)


def _mask(rng: random.Random, thing: Thing, side: int, new_style: bool) -> Image.Image:
    """Where the thing is, L[side, side]."""
    mask = Image.new("L", (side, side), 0)
    draw, radius, x, y = ImageDraw.Draw(mask), thing.size * side / 2, thing.x * side, thing.y * side
    if thing.kind in DIGITS:
        if new_style or rng.random() < 0.7:
            _print(rng, draw, thing.kind, (x, y), 2 * radius, HELD_OUT_FONT if new_style else rng.choice(FONTS))
        else:
            _write(rng, draw, thing.kind, (x, y), 2 * radius)
        turn, lean = math.radians(rng.uniform(-7, 7)), rng.uniform(-0.15, 0.15) * (not new_style)
        wide, (sin, cos) = 1.0 if new_style else rng.uniform(0.85, 1.25), (math.sin(turn), math.cos(turn))
        a, b, c, d = cos * wide, (sin + cos * lean) * wide, -sin, cos - sin * lean
        places = (a, b, x - a * x - b * y, c, d, y - c * x - d * y)
        return mask.transform(mask.size, Image.Transform.AFFINE, places, Image.Resampling.BILINEAR)
    if thing.kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), 255)
        return mask
    turn = math.radians(rng.uniform(-14, 14))
    points = [(x + radius * length * math.sin(a + turn), y - radius * length * math.cos(a + turn))
              for length, a in _corners(thing.kind)]  # fmt: skip
    draw.polygon(points, 255)
    return mask


def _corners(kind: str) -> list[tuple[float, float]]:
    """(distance from the centre, angle from the top) of the corners of a shape of radius 1."""
    if kind == "square":
        return [(1.15, math.tau * (i / 4 + 1 / 8)) for i in range(4)]
    if kind == "triangle":
        return [(1.05, math.tau * i / 3) for i in range(3)]
    if kind == "star":
        return [(1.05 if i % 2 == 0 else 0.43, math.tau * i / 10) for i in range(10)]
    wide, far = 0.3, 0.95
    corners = [(wide, -far), (wide, -wide), (far, -wide), (far, wide), (wide, wide), (wide, far),
               (-wide, far), (-wide, wide), (-far, wide), (-far, -wide), (-wide, -wide), (-wide, -far)]  # fmt: skip
    return [(math.hypot(x, y), math.atan2(x, -y)) for x, y in corners]


@functools.lru_cache(256)
def _font(name: str, pixels: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.truetype(name, pixels) if name else ImageFont.load_default(pixels)


def _print(
    rng: random.Random, draw: ImageDraw.ImageDraw, digit: str, at: tuple[float, float], high: float, font: str
) -> None:
    """The digit in a font; its height is about `high` pixels."""
    pixels = max(8, round(high * 1.3 / 8) * 8)
    left, top, right, bottom = draw.textbbox((0, 0), digit, font=_font(font, pixels))
    place = (at[0] - (left + right) / 2, at[1] - (top + bottom) / 2)
    draw.text(place, digit, 255, font=_font(font, pixels), stroke_width=round(high * rng.choice((0, 0, 0.02, 0.04))))


def _write(rng: random.Random, draw: ImageDraw.ImageDraw, digit: str, at: tuple[float, float], high: float) -> None:
    """The digit as lines whose corners move a little."""
    wide, slant = high * rng.uniform(0.45, 0.75), rng.uniform(-0.1, 0.25)
    pen = max(2, round(high * rng.uniform(0.08, 0.17)))
    points = []
    for x, y in _LINES[digit]:
        x, y = x + rng.gauss(0, 0.02), y + rng.gauss(0, 0.02)
        points.append((at[0] + (x - 0.5 + slant * (0.5 - y)) * wide, at[1] + (y - 0.5) * (high - pen)))
    draw.line(points, 255, pen, joint="curve")
    for x, y in points:
        draw.ellipse((x - pen / 2, y - pen / 2, x + pen / 2, y + pen / 2), 255)


if __name__ == "__main__":
    example().image.save(Path(__file__).resolve().parents[2] / "examples" / "shapes.png", optimize=True)
