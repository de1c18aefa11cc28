"""Ways to ask: texts with `[a|b]` choices and `{name}` macros, and how people vary what they type."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

PREFIXES = (
    "hi, ",
    "hello, ",
    "hey, ",
    "please, ",
    "quick question: ",
    "sorry, ",
    "ok, ",
    "one question: ",
    "well, ",
    "please tell me: ",
    "i wonder, ",
    "so ",
    "and ",
    "hello! ",
    "hi! ",
    "could you tell me, ",
    "do you know, ",
    "can you tell me: ",
    "i would like to know: ",
    "question: ",
    "now ",
    "alright, ",
    "tell me, ",
    "excuse me, ",
)
SUFFIXES = (
    " please",
    ", please",
    " exactly",
    " in mlcpipe",
    " with mlcpipe",
    " here",
    " then",
    " again",
    " for me",
    ", thanks",
    " actually",
    " in short",
    " and why",
    " right now",
    " in simple words",
    " briefly",
)
# Small words that people leave out; dropping them must not change the answer.
DROPPABLE = frozenset(["a", "an", "the", "do", "i", "my", "is", "to", "please", "does", "of"])
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "how do i": (
        "how can i",
        "how could i",
        "how would i",
        "how might i",
        "how should one",
        "what's the way to",
        "how am i supposed to",
        "what do i do to",
        "what should i do to",
        "i need to know how to",
    ),
    "what is": ("what's", "whats", "what exactly is", "what would be", "please tell me what is"),
    "which": ("what",),
    "show me": ("give me", "print", "display", "let me see"),
    "compile": ("build", "compile", "compile"),
    "supported": ("supported", "available", "working"),
    "use": ("use", "employ", "utilize", "work with"),
    "see": ("see", "view", "check", "look at", "find"),
    "how much": ("how much", "what amount of"),
    "i get": ("i see", "there is", "i have", "it gives me"),
    "does not work": ("doesn't work", "fails", "is not working", "won't work"),
    "can i": ("could i", "may i", "can one", "is it possible to"),
    "explain": ("describe", "tell me about", "please explain", "could you explain"),
    "make": ("make", "create", "produce"),
    "change": ("change", "adjust", "modify", "set"),
    "add": ("add", "write", "contribute", "implement"),
    "what does": ("what does", "what will", "what would"),
    "my": ("my", "the", "our", "this"),
    "want": ("want", "need", "would like"),
    "need": ("need", "require", "have to have"),
    "difference": ("difference", "distinction"),
    "find": ("find", "locate", "get"),
    "get": ("get", "obtain", "have"),
    "why is": ("why is", "how come", "what is the reason that"),
    "start": ("start", "launch", "begin"),
    "run": ("run", "execute", "run"),
}


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


def vary(text: str, rng: random.Random) -> str:
    """`text` as another person might type it: synonyms, prefix, dropped words, typos, case, punctuation."""
    if rng.random() < 0.25:
        found = [s for s in SYNONYMS if re.search(rf"\b{re.escape(s)}\b", text)]
        if found:
            old = rng.choice(found)
            text = re.sub(rf"\b{re.escape(old)}\b", rng.choice(SYNONYMS[old]), text, count=1)
    long = len(text.split()) > 2
    if long and rng.random() < 0.12:
        text = " ".join(w for w in text.split() if w not in DROPPABLE or rng.random() < 0.5)
    if long and rng.random() < 0.15:
        text = rng.choice(PREFIXES) + text
    if long and rng.random() < 0.10:
        text += rng.choice(SUFFIXES)
    if rng.random() < 0.12:
        words = text.split()
        for _ in range(rng.choice((1, 1, 2))):
            i = rng.randrange(len(words))
            words[i] = _typo(words[i], rng)
        text = " ".join(words)
    return _punctuate(text, rng)


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
