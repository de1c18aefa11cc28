"""The answer's way to the terminal: safe, the same for any chunks, wrapped, append-only."""

from __future__ import annotations

import random
import re

import pytest

from mlcpipe.cli.chat.markdown import MarkdownRenderer
from mlcpipe.cli.chat.renderer import PlainRenderer
from mlcpipe.cli.terminal import sanitize

SGR = re.compile(r"\x1b\[(?:0|1|2|36)m")

SAMPLE = """# A *heading* with `code`

Some **bold text**, `x**2`, 2**3, 2*3*4 and a line that is long enough to be wrapped more than once, I think.
- an item that is long enough to be wrapped to the next line, under its own text
  * nested **item**
12) numbered
> quoted
***
~~~c
int *p;  **not bold**
\t- no list
```
~~~
```python
```
日本語のとても長い文章はどこでも折り返すことができますので**重点**です。
``a ` b`` \\*plain\\* snake_case **open to the end of the line
--flag, -5 degrees, 3.14 and #hashtag
| a   | b |
end"""


def render(text: str, sizes: list[int], columns: int = 40, *, unicode: bool = True) -> str:
    out: list[str] = []
    renderer = MarkdownRenderer(out.append, lambda: columns, unicode=unicode)
    at = 0
    for size in [*sizes, len(text)]:
        renderer.feed(text[at : at + size])
        at += size
    renderer.close()
    return "".join(out)


def plain(text: str, columns: int = 40) -> list[str]:
    return SGR.sub("", render(text, [], columns)).split("\n")


@pytest.mark.parametrize("seed", range(20))
def test_how_the_stream_is_cut_does_not_show(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 7) for _ in range(len(SAMPLE))]
    shown = [render(SAMPLE, cut, columns=37 + seed) for cut in ([], sizes, [1] * len(SAMPLE))]
    # where chunks end, a style may be closed and opened again: compare each character with its style
    assert styled(shown[0]) == styled(shown[1]) == styled(shown[2])


def styled(text: str) -> list[tuple[str, str]]:
    style, result = "0", []
    for part in re.split(r"(\x1b\[\d+m)", text):
        if match := re.fullmatch(r"\x1b\[(\d+)m", part):
            style = match[1]
        else:
            result += [(char, style) for char in part]
    return result


@pytest.mark.parametrize("seed", range(20))
def test_no_control_sequence_of_the_model_gets_through(seed: int) -> None:
    draw = random.Random(seed)
    hostile = [*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2066", "\u200f", "\u2028", "\ud800"]
    hostile += ["\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\U000e0041", "a", " ", "*", "**", "`", "```", "- ", "# "]
    text = "".join(draw.choice(hostile) for _ in range(400))
    shown = SGR.sub("", render(text, [draw.randint(1, 5) for _ in range(400)]))
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200f\ud800-\udfff\U000e0000-\U000e007f]", shown
    )
    shown.encode()


def test_plain_text_is_sanitized_and_otherwise_untouched() -> None:
    out: list[str] = []
    renderer = PlainRenderer(out.append)
    renderer.feed("**a**\r\n\tb\x1b[31m")
    renderer.close()
    assert "".join(out) == "**a**\n\tb[31m"


def test_sanitize_keeps_what_languages_need() -> None:
    text = "Zürich नमस्ते 👩‍👩‍👧 e\u0301 עברית\n\tx"
    assert sanitize(text) == text


@pytest.mark.parametrize("columns", [20, 33, 80])
def test_lines_fit_the_terminal(columns: int) -> None:
    from rich.cells import cell_len

    text = "word " * 40 + "\n- item " + "longer " * 30 + "\n" + "日本語" * 40 + "\n" + "x" * 300
    assert all(cell_len(line) < columns for line in plain(text, columns) if "x" * 30 not in line)


def test_wrapping_keeps_the_words() -> None:
    text = "The quick brown fox jumps over the lazy dog and runs away from it as fast as it can."
    assert " ".join(plain(text, 25)) == text


def test_list_items_hang() -> None:
    lines = plain("- one two three four five six seven\n12. one two three four five six", 20)
    assert lines[0].startswith("• one") and lines[1].startswith("  ")
    numbered = next(i for i, line in enumerate(lines) if line.startswith("12. "))
    assert lines[numbered + 1].startswith("    ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("**bold** `code`", "\x1b[1mbold\x1b[0m \x1b[36mcode\x1b[0m"),
        ("# Title\nx", "\x1b[1mTitle\x1b[0m\nx"),
        ("2**3 a*b*c", "2**3 a*b*c"),
        ("``a`b``", "\x1b[36ma`b\x1b[0m"),
        ("`**x**`", "\x1b[36m**x**\x1b[0m"),
        (r"\*x\* \(y\)", r"*x* \(y\)"),
        ("> q", "\x1b[2m│ \x1b[0mq"),
        ("-5 and --flag", "-5 and --flag"),
        ("3.14 is pi", "3.14 is pi"),
        ("#tag", "#tag"),
        ("a   b", "a   b"),
        ("```inline``` x", "\x1b[36minline\x1b[0m x"),
        ("**open\nnext", "\x1b[1mopen\x1b[0m\nnext"),
        ("", ""),
        ("-", "-"),
        ("\n\n", "\n\n"),
    ],
)
def test_marks(text: str, shown: str) -> None:
    assert styled(render(text, [])) == styled(shown)


def test_code_is_verbatim() -> None:
    code = "def f(*a, **k):\n\treturn  `x`\n\n- not a list" + "y" * 100
    lines = plain(f"```python\n{code}\n```\nafter", 40)
    assert "\n".join(lines[1:-2]) == code
    assert "python" in lines[0] and lines[-1] == "after"


def test_a_fence_of_the_other_kind_does_not_end_code() -> None:
    lines = plain("~~~\n```\n~~~~\nafter")
    assert lines[1] == "```" and lines[-1] == "after"


def test_ascii_terminals_get_ascii() -> None:
    assert render("- a\n> b\n---\n```\nc\n```\n", [], unicode=False).isascii()


def test_text_is_not_held_back_longer_than_a_word() -> None:
    out: list[str] = []
    renderer = MarkdownRenderer(out.append, lambda: 80)
    renderer.feed("Hello there my")
    assert "".join(out) == "Hello there"


def test_a_narrower_terminal_counts_from_then_on() -> None:
    out: list[str] = []
    columns = [80]
    renderer = MarkdownRenderer(out.append, lambda: columns[0])
    renderer.feed("word " * 10 + "\n")
    columns[0] = 22
    renderer.feed("word " * 10 + "\n")
    first, *rest = "".join(out).rstrip("\n").split("\n")
    assert len(first) == 49 and all(len(line) <= 21 for line in rest)


@pytest.mark.parametrize("size", [1, 3, 99])
def test_thoughts_are_dim_and_wrapped(size: int) -> None:
    out: list[str] = []
    renderer, thoughts = MarkdownRenderer(out.append, lambda: 24), "one **two** three four five\n\n  six\x1b[2J"
    for at in range(0, len(thoughts), size):
        renderer.think(thoughts[at : at + size])
    renderer.feed("**Yes**")
    renderer.close()
    shown = [(char, style) for char, style in styled("".join(out)) if char not in " \n"]
    assert SGR.sub("", "".join(out)) == "one **two** three four\nfive\n\n  six[2J\n\nYes"
    assert {style for char, style in shown[:-3]} == {"2"} and shown[-3:] == [(char, "1") for char in "Yes"]
