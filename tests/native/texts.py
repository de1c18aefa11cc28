"""Texts that tokenizers get wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence

SEED = 20261123
WORDS = [
    "hello",
    "The",
    "QUICK",
    "don't",
    "I'LL",
    "we'Re",
    "it's",
    "'Tis",
    "''s",
    "x=1;",
    "//",
    "c++",
    "->",
    "{[()]}",
    "#include",
    "<a.h>",
    "1.5e-10",
    "12345678",
    "½²",
    "٣٤५",
    "日本語の",
    "テキスト、テスト。",
    "中文文本",
    "한국어",
    "각",
    "각",
    "Привет",
    "мир",
    "Příliš",
    "žluťoučký",
    "कार्यक्रम",
    "สวัสดี",
    "é",
    "ǟ",
    "ạ̈",
    "ṩ",
    "ﬁ",
    "ﬆ",
    "ß",
    "ſ",
    "K",
    "Å",
    "①",
    "㎏",
    "👨\u200d👩\u200d👧\u200d👦",
    "🇨🇿",
    "👍🏽",
    "🎉",
    "ꙮ",
    "𓀀",
    "🦖",
    "\U0010ffff",
    "�",
    "\u200b",
    "\u200d",
    "\ufeff",
    "<s>",
    "</s>",
    "<|end|>",
    "<unk>",
    "<0x41>",
    "<0x0A>",
    "▁",
    "▁▁",
    "Ġ",
    "Ċ",
    "ÿ",
    "<a",
    "b>",
    "žluť",
    "<|im_start|>",
    "<|eot_id|>",
]
WORDS += [
    "d\u0301\u0307",
    "s\u0301\u0323\u0307",
    "a\u0315\u0300\u05ae\u0300",
    "\u1100\u1161\u11a8\u11a8",
]  # marks in a row
SPACES = ["", "", " ", " ", "  ", "\t", "\n", "\r\n", "\n\n", "   \n ", "\u00a0", "\u2003", "\u3000", "\x0b", "\x85"]
CONTROLS = [chr(code) for code in (0, 1, 7, 27, 127, 0x80, 0x9F, 0xAD, 0x2028, 0x2029)]
MARKS = ["\u0300", "\u0301", "\u0323", "\u0334", "\u0345", "\u093c", "\u094d", "\u1161", "\u11a8", "\u3099"]
LONG = [" " * 300, "a" * 300, "A" * 100, "\n" * 200, "1" * 100, "字" * 100, "é" * 50, "'" * 60, " \n" * 80, "<" * 50]


def texts(count: int, more: Sequence[str] = (), seed: int = SEED) -> list[str]:
    """Words, spaces, signs and any characters in any order; `more` are words too."""
    draw = random.Random(seed)
    words = [*WORDS, *more]
    made = ["", *LONG, *words, " ".join(words)]
    while len(made) < count:
        parts = []
        for _ in range(draw.randrange(1, 12)):
            kind = draw.random()
            if kind < 0.55:
                parts.append(draw.choice(words))
            elif kind < 0.65:
                parts.append(draw.choice(CONTROLS + MARKS))
            elif kind < 0.75:
                parts.append("".join(_any(draw) for _ in range(draw.randrange(1, 6))))
            else:
                parts.append(chr(draw.randrange(32, 127)) * draw.choice((1, 1, 2, 3, 9)))
            parts.append(draw.choice(SPACES))
        made.append("".join(parts))
    return made


def _any(draw: random.Random) -> str:
    code = draw.choice((draw.randrange(0x80, 0x3000), draw.randrange(0xAC00, 0xD7A4), draw.randrange(0xE000, 0x110000)))
    return chr(code)
