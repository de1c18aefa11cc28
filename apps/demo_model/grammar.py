"""Ways to ask: texts with `[a|b]` choices and `{name}` macros, and how people vary what they type."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """The words that `vary` inserts, drops and exchanges.

    `openings` say little, so one may stand for another; `droppable` are small words that people leave out;
    the words of one group of `synonyms` may stand for each other in a question.
    """

    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    openings: tuple[str, ...]
    droppable: frozenset[str]
    synonyms: tuple[tuple[str, ...], ...]


class CorpusError(ValueError):
    """A knowledge file is malformed; the message names the file and the line."""


def draw(grammar: str, macros: Mapping[str, str], rng: random.Random) -> str:
    """One text of `grammar`: macros replaced, one choice of each `[a|b]` taken, spaces tidied."""
    while True:
        replaced = re.sub(r"\{([\w.]+)\}", lambda m: _macro(m.group(1), macros, rng), grammar)
        if replaced == grammar:
            break
        grammar = replaced
    while "[" in grammar:
        grammar = re.sub(r"\[([^\[\]]*)\]", lambda m: rng.choice(m.group(1).split("|")), grammar)
    return re.sub(r"\s+", " ", grammar).strip()


def _macro(name: str, macros: Mapping[str, str], rng: random.Random) -> str:
    if name == "num":
        return str(rng.choice((rng.randint(0, 20), rng.randint(0, 100), rng.randint(0, 5000))))
    if name not in macros:
        raise CorpusError(f"unknown macro {{{name}}}")
    return macros[name]


def _typo(word: str, rng: random.Random) -> str:
    if len(word) < 4:
        return word
    i = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:i] + word[i + 1 :]
    if kind == 1:
        return word[:i] + word[i + 1] + word[i] + word[i + 2 :]
    if kind == 2:
        return word[:i] + word[i] + word[i:]
    return word[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[i + 1 :]


def vary(text: str, words: Words, rng: random.Random) -> str:
    """`text` as another person might type it: synonyms, other openings, dropped words, typos, punctuation."""
    if len(text.split()) > 2:
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            text = _synonym(text, words, rng)
        if rng.random() < 0.10:
            text = _other_opening(text, words, rng)
        if rng.random() < 0.20:
            text = " ".join(w for w in text.split() if w not in words.droppable or rng.random() < 0.5) or text
        if rng.random() < 0.05:
            mixed = text.split()
            rng.shuffle(mixed)
            text = " ".join(mixed)
        if rng.random() < 0.18:
            text = f"{rng.choice(words.prefixes)} {text}"
        if rng.random() < 0.12:
            suffix = rng.choice(words.suffixes)
            text += suffix if suffix.startswith(",") else f" {suffix}"
    if rng.random() < 0.12:
        typed = text.split()
        for _ in range(rng.choice((1, 1, 2))):
            i = rng.randrange(len(typed))
            typed[i] = _typo(typed[i], rng)
        text = " ".join(typed)
    return _punctuate(text, rng)


def _synonym(text: str, words: Words, rng: random.Random) -> str:
    """`text` with one word or phrase of a group of synonyms replaced by another of that group."""
    padded = f" {text} "
    found = [(word, group) for group in words.synonyms for word in group if f" {word} " in padded]
    if not found:
        return text
    word, group = rng.choice(found)
    return padded.replace(f" {word} ", f" {rng.choice(group)} ", 1).strip()


def _other_opening(text: str, words: Words, rng: random.Random) -> str:
    """`text` without its opening, or with another one."""
    for opening in words.openings:
        if text.startswith(f"{opening} ") and len(text) > len(opening) + 4:
            text = text[len(opening) + 1 :]
            break
    return text if rng.random() < 0.4 else f"{rng.choice(words.openings)} {text}"


def _punctuate(text: str, rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.5:
        text = text[:1].upper() + text[1:]
        for word in (
            "cpu",
            "cuda",
            "webgpu",
            "kv",
            "gpu",
            "nvidia",
            "ir",
            "api",
            "vulkan",
            "metal",
            "tvm",
            "llama",
        ):
            proper = word.capitalize() if word in ("vulkan", "metal", "llama") else word.upper()
            text = re.sub(rf"\b{word}\b", {"webgpu": "WebGPU"}.get(word, proper), text)
        text = re.sub(r"\bi\b", "I", text)
    elif roll < 0.53:
        text = text.upper()
    if text and text[-1].isalnum():
        text += rng.choices(("?", "", ".", " ?", "??", "!"), (60, 30, 5, 2, 1, 2))[0]
    return text


def normalize(text: str) -> str:
    """`text` without case and punctuation, to compare questions."""
    return re.sub(r"[^a-z0-9_]+", " ", text.lower()).strip()
