"""Questions about a picture of `pictures.py`, and their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pictures import COLOURS, DIGITS, SHAPES, Thing

_NUMBERS = ("no", "one", "two", "three")
# The last way to ask each is kept for tests.
_WHAT = (
    "What do you see?", "What is in this picture?", "What is in the picture?", "Describe this picture.",
    "Describe the picture.", "What can you see?", "What does the picture show?", "What is in this image?",
    "What do you see in this picture?", "What can you see in the picture?",
)  # fmt: skip
_COLOUR = (
    "What colour is the {}?", "What color is the {}?", "Which colour is the {}?", "What colour does the {} have?",
    "What is the colour of the {}?", "Tell me the colour of the {}.", "What is the color of the {}?",
)  # fmt: skip
_WHICH = ("Which thing is {}?", "What is {}?", "What is {} in this picture?", "What is {} in the picture?")
_DIGIT = (
    "Which digit is this?", "What digit is this?", "Which digit is in the picture?", "What digit do you see?",
    "Which number is this?", "Read the digit.", "Which digit do you see?",
)  # fmt: skip
_COUNT = (
    "How many shapes are there?", "How many shapes do you see?", "How many shapes are in the picture?",
    "Count the shapes.", "How many shapes are in this picture?",
)  # fmt: skip
_THERE = (
    "Is there a {}?", "Do you see a {}?", "Is a {} in the picture?", "Can you see a {}?",
    "Is there a {} in the picture?",
)  # fmt: skip
_SHAPE = (
    "Which shape is this?", "What shape is this?", "Which shape is in the picture?", "What shape is in the picture?",
)  # fmt: skip


def _named(thing: Thing) -> str:
    return f"a {thing.colour} {thing.kind}"


def _all(things: Sequence[Thing]) -> str:
    names = [_named(t) for t in things]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def ask(
    rng: random.Random, things: Sequence[Thing], held_out: bool = False, unnamed: bool = False
) -> tuple[str, str, str]:
    """A kind of question, a question that a picture of these things answers, and the answer.

    Nothing is asked by its colour or for it where colours are unnamed.
    """

    def form(forms: Sequence[str]) -> str:
        return forms[-1] if held_out and rng.random() < 0.5 else rng.choice(forms[:-1])

    shapes, digits = [t for t in things if t.kind in SHAPES], [t for t in things if t.kind in DIGITS]
    kinds = ["what", "what", "count", "there"] + ["digit"] * (3 * bool(digits))
    kinds += [] if unnamed else ["colour", "colour", "which"]
    kinds += ["shape"] * (len(shapes) == len(things) == 1)
    kind, one = rng.choice(kinds), rng.choice(things)
    if kind == "which" and sum(t.colour == one.colour for t in things) > 1:
        kind = "colour"
    if kind == "what":
        answer = _all(things)
        asked, answer = form(_WHAT), f"{answer[0].upper()}{answer[1:]}."
    elif kind == "digit":
        asked, answer = form(_DIGIT), f"It is a{'n' * (digits[0].kind == '8')} {digits[0].kind}."
    elif kind == "shape":
        asked, answer = form(_SHAPE), f"It is a {shapes[0].kind}."
    elif kind == "count":
        verb = "is" if len(shapes) == 1 else "are"
        asked, answer = form(_COUNT), f"There {verb} {_NUMBERS[len(shapes)]} shape{'s' * (len(shapes) != 1)}."
    elif kind == "colour":
        name = rng.choice((one.kind, "digit")) if one.kind in DIGITS else one.kind
        asked, answer = form(_COLOUR).format(name), f"The {one.kind} is {one.colour}."
    elif kind == "which":
        asked, answer = form(_WHICH).format(one.colour), f"The {one.kind} is {one.colour}."
    else:
        shape = rng.choice(SHAPES)
        there = [t for t in shapes if t.kind == shape]
        asked = form(_THERE).format(shape)
        answer = f"Yes, {_named(there[0])}." if there else f"No, there is no {shape}."
    return kind, varied(rng, asked), answer


def varied(rng: random.Random, question: str) -> str:
    """As people type it: sometimes in lower case, without the mark at its end."""
    if rng.random() < 0.1:
        question = question.lower()
    return question.rstrip("?.") if rng.random() < 0.15 else question


def texts() -> list[str]:
    """All words, for the tokenizer."""
    names = [*SHAPES, *DIGITS, "digit"]
    questions = [*_WHAT, *_DIGIT, *_COUNT, *_SHAPE, *(q.format(n) for q in (*_COLOUR, *_THERE) for n in names)]
    questions += [q.format(c) for q in _WHICH for c in COLOURS]
    answers = [f"There {v} {n} shape{s}." for v, s in (("is", ""), ("are", "s")) for n in _NUMBERS]
    answers += [f"The {n} is {c}. A {c} {n}, a {c} {n} and a {c} {n}." for n in names for c in COLOURS]
    answers += [f"It is a {n}. It is an 8. No, there is no {n}. Yes, a {n}." for n in names]
    return [*questions, *(q.lower() for q in questions), *answers * 2]
