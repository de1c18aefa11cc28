"""Grammars inside JSON strings, compared with Python's expressions, and with the same grammars outside JSON."""

from __future__ import annotations

import json
import random
import re

import pytest

llguidance = pytest.importorskip("llguidance")

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.lark_in_json import MAX_LARK, escaped
from tests.unit.server.tools import PATCH_GRAMMAR, PATCHES

BYTES = llguidance.LLTokenizer("byte")
ATOMS = [
    "a",
    "[ab]",
    '[^"]',
    '"',
    r"\\",
    r"\n",
    ".",
    r"[\n-\x20]",
    r"\s",
    r"\W",
    "(?s:.)",
    r'[^\n\\"]',
    r"[\]\"b]",
    "(?i:A)",
    "[\\n一]",
]
TIMES = ["", "", "", "*", "+", "?", "{2}", "{0,2}", "{1,}"]


def fits(lark: str, text: str) -> bool:
    """Whether a text is one of a grammar's."""
    matcher = llguidance.LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in BYTES.tokenize_str(text)) and bool(matcher.is_accepting())


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def regex(draw: random.Random, depth: int = 2) -> str:
    parts = []
    for _ in range(draw.randint(1, 3)):
        one = draw.choice(ATOMS) if depth == 0 or draw.random() < 0.7 else f"({regex(draw, depth - 1)})"
        parts.append(one + draw.choice(TIMES))
    return "".join(parts) if draw.random() < 0.7 else "|".join(parts)


def test_expressions_match_the_same_texts() -> None:
    draw, found, refused = random.Random(4), [0, 0], list[str]()
    for _ in range(40):
        asked = regex(draw)
        try:
            lark = escaped(f"start: /{asked}/")
        except UsageError as error:  # of a part that repeats a part that repeats
            refused.append(str(error))
            continue
        for _ in range(6):
            text = "".join(draw.choice('aab"\\\n \tA]\x7f一') for _ in range(draw.randint(0, 5)))
            expected = re.fullmatch(asked, text) is not None
            assert fits(lark, in_json(text)) is expected, (asked, text, lark)
            found[expected] += 1
    assert min(found) > 25 and len(refused) < 8 and all("at most 24 places" in one for one in refused)


GRAMMARS: list[tuple[str, list[str]]] = [
    (PATCH_GRAMMAR, [*PATCHES, PATCHES[0] + "x", "*** Begin Patch\n*** End Patch", PATCHES[0].replace("@@", "@")]),
    ('start: A+\nA: "x\\ty"i | /[\\n-\\r"]/ | "\\\\"i', ["X\tY", "x\ty\\", '\x0b"', "\n\r", "\x0e", "xy"]),
    ("start: e\ne: n (\"+\" n)*\nn: /[0-9]+/\n%ignore /[ \\n]+/  // between", ["1 +\n2", "1", "+", "1\t+2", "1+\n\n 2"]),
    ("start: S (\",\" S)~1..2 -> some\nS: Q WORD Q\nQ: \"\\\"\"\n%import common (WORD, LF)", ['"a","b"', '"a"', '"a","b","c"', 'a,b', '"a","b","c","d"']),
    ("start: ESCAPED_STRING\n    | a?\n!a: \"é/\" /\\//\n%import common.ESCAPED_STRING", ['"a\\"b"', '"a', '"\\\\"', "é//", "", "é/"]),
]  # fmt: skip


@pytest.mark.parametrize(("lark", "texts"), GRAMMARS)
def test_grammars_describe_the_same_texts(lark: str, texts: list[str]) -> None:
    verdicts = [fits(lark, text) for text in texts]
    assert [fits(escaped(lark), in_json(text)) for text in texts] == verdicts
    assert {*verdicts} == {True, False}


@pytest.mark.parametrize(
    "lark",
    [
        "start: <|im_end|>", "start: @other", 'start: %json {"type": "string"}', "start: A\nA: /a/ & ~/b/", "start: /a/x",
        "start[max_tokens=3]: /a/", "start: /(?=a)b/", "start: /a*?/", "start: /[[:alpha:]]/", r"start: /[a&&b]/", "start: /(a/",
        'start: "\\q"', "%import python.X\nstart: X", "start: A\nA: B\nB: A", "start: A", "start: /[\\n]{999}/", "start: /\\p{Cc}/",
        "start: A\n" + "\n".join(f'A{"A" * n}: A{"A" * (n + 1)} A{"A" * (n + 1)}' for n in range(20)),
        "start: /" + '"?' * 250 + "/", "start: /" + "(" * 9000 + "/", "start: /" + '("*' * 17 + ")*" * 17 + "/",
        "start: " + " ".join(f"/[\\n{chr(0x4E00 + index)}]/" for index in range(6000)),
        "a" * (MAX_LARK + 1),
    ],
    ids=lambda lark: lark[:24],
)  # fmt: skip
def test_what_cannot_be_inside_json_is_refused(lark: str) -> None:
    with pytest.raises(UsageError):
        escaped(lark)
