"""Shows a model's answer on a terminal while it streams: Markdown, wrapped, and never a control sequence.

Output is append-only: nothing on the screen is ever rewritten, so that nothing flickers. Text is held back
only while it is ambiguous: the current word (it may have to go to the next line) and a possible marker ("*",
"```"). Markup that a terminal cannot show while streaming (tables, links, single "*") stays as the model wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mlcpipe.cli.terminal import sanitize

BOLD, CODE, DIM = "1", "36", "2"

# Prefixes of a line that are still ambiguous; more text decides.
_UNDECIDED = re.compile(r" *(?:`{1,2}|~{1,2}|`{3,}[^`]*|~{3,}.*|#{1,6}|\d{1,9}[.)]?|[-*_+ ]*|>)")
_FENCE = re.compile(r" *(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_RULE = re.compile(r" *(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})")
_HEADING = re.compile(r" {0,3}#{1,6} +")
_BULLET = re.compile(r"(?P<indent> *)[-*+] +")
_NUMBER = re.compile(r"(?P<indent> *)(?P<mark>\d{1,9}[.)]) +")
_QUOTE = re.compile(r" {0,3}> ?")


@dataclass(frozen=True)
class Segment:
    """Text in one style; `style` is the parameters of an SGR sequence (ECMA-48 8.3.117), "" for none."""

    text: str
    style: str

    def __str__(self) -> str:
        # every segment ends its own style, so that an interrupted answer cannot colour later text
        return f"\x1b[{self.style}m{self.text}\x1b[0m" if self.style else self.text


class WordWrapper:
    """Lays words out; a word that does not fit starts the next line, indented by `hang` columns.

    `drain` writes the laid-out text in one piece; the last word is held until `flush` or a space ends it.
    """

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int]) -> None:
        self._write = write
        self._columns = columns
        self._ready: list[Segment] = []
        self._word: list[Segment] = []
        self._spaces = 0
        self.column = 0
        self.hang = 0

    def put(self, char: str, style: str) -> None:
        """Add one character other than a newline to the text."""
        if char in " \t":
            self.flush()
            self._spaces += 1
        elif _cells(char) > 1:  # East Asian text breaks between any two characters
            self.flush()
            self._word.append(Segment(char, style))
            self.flush()
        else:
            _append(self._word, char, style)
            if len(self._word[-1].text) >= self.limit:
                self.flush()

    def newline(self) -> None:
        """End the line."""
        self.flush()
        _append(self._ready, "\n", "")
        self.column, self._spaces, self.hang = 0, 0, 0

    def verbatim(self, text: str, style: str = "") -> None:
        """Lay text out verbatim (a list mark, a line of code), without wrapping."""
        self.flush()
        _append(self._ready, text, style)
        self.column += _cells(text)

    def flush(self) -> None:
        """Place the held word."""
        if not self._word:
            return
        width = sum(_cells(s.text) for s in self._word)
        gap = self._spaces
        if self.column > self.hang and self.column + gap + width > self.limit:
            _append(self._ready, "\n" + " " * self.hang, "")
            self.column, gap = self.hang, 0
        _append(self._ready, " " * gap, "")
        for segment in self._word:
            _append(self._ready, segment.text, segment.style)
        self.column += gap + width
        self._word, self._spaces = [], 0

    def drain(self) -> None:
        """Write everything that is placed."""
        if self._ready:
            self._write("".join(map(str, self._ready)))
            self._ready = []

    @property
    def limit(self) -> int:
        """The usable columns; the last one stays free, as terminals differ in when they wrap there."""
        return max(self._columns(), 20) - 1


class MarkdownRenderer:
    """Renders headings, lists, quotes, rules, fenced code, `code` and **bold** while the text arrives."""

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int], *, unicode: bool = True) -> None:
        self._out = WordWrapper(write, columns)
        self._bullet, self._bar, self._line = ("•", "│", "─") if unicode else ("-", "|", "-")
        self._held = ""  # characters that cannot be shown before more is known
        self._at_line_start = True
        self._fence = ""  # the marker that opened the current code block, "" outside
        self._line_style = ""
        self._bold = False
        self._ticks = 0  # how many backticks opened the current code span
        self._before = ""  # the character before the current one, on this line
        self._thinks = False

    def think(self, text: str) -> None:
        """Show thoughts: dim, wrapped, otherwise as the model wrote them."""
        self._thinks = True
        for char in sanitize(text):
            if char == "\n":
                self._out.newline()
            else:
                self._out.put(char, DIM)
        self._out.drain()

    def feed(self, text: str) -> None:
        """Show the decided part of the text."""
        if self._thinks:
            self._out.newline()
            self._out.newline()
            self._thinks = False
        for char in sanitize(text):
            self._char(char)
        self._out.drain()

    def close(self) -> None:
        """Decide about the rest."""
        if self._at_line_start:
            self._begin_line(final=True)
        else:
            self._inline(final=True)
        self._out.flush()
        self._out.drain()

    def _char(self, char: str) -> None:
        if char == "\n":
            self._end_line()
        elif self._at_line_start:
            self._held += "    " if char == "\t" and not self._fence else char
            self._begin_line(final=False)
        elif self._fence:
            self._out.verbatim(char, CODE)
        else:
            self._held += char
            self._inline(final=False)

    def _end_line(self) -> None:
        hidden = False
        if self._at_line_start:
            hidden = self._begin_line(final=True)
        else:
            self._inline(final=True)
        if not hidden:
            self._out.newline()
        self._at_line_start, self._held, self._before = True, "", ""
        self._line_style, self._bold, self._ticks = "", False, 0

    def _begin_line(self, *, final: bool) -> bool:
        """Decide what kind of line this is. True if it was a fence or rule, which ends its own line."""
        held = self._held
        if self._fence:
            return self._begin_code_line(final=final)
        if not final and _UNDECIDED.fullmatch(held):
            return False
        self._held, self._at_line_start = "", False
        if final and (match := _FENCE.fullmatch(held)):
            self._fence = match["fence"]
            self._ruler(match["info"].strip())
            return True
        if final and _RULE.fullmatch(held):
            self._ruler("")
            return True
        for char in held[self._mark(held) :]:
            self._held += char
            self._inline(final=False)
        if final:
            self._inline(final=True)
        return False

    def _begin_code_line(self, *, final: bool) -> bool:
        mark = self._held.strip(" ")
        if final and len(mark) >= len(self._fence) and set(mark) == {self._fence[0]}:
            self._fence = ""
            self._held, self._at_line_start = "", False
            self._ruler("")
            return True
        if final or mark.strip(self._fence[0]):
            held, self._held, self._at_line_start = self._held, "", False
            if held:
                self._out.verbatim(held, CODE)
        return False

    def _mark(self, held: str) -> int:
        """Show the mark that begins a heading, list item or quote -> how much of the line it took."""
        out = self._out
        if match := _HEADING.match(held):
            self._line_style = BOLD
        elif match := _BULLET.match(held):
            out.verbatim(f"{self._indent(match['indent'])}{self._bullet} ")
        elif match := _NUMBER.match(held):
            out.verbatim(f"{self._indent(match['indent'])}{match['mark']} ")
        elif match := _QUOTE.match(held):
            out.verbatim(f"{self._bar} ", DIM)
        else:
            spaces = len(held) - len(held.lstrip(" "))
            out.verbatim(self._indent(held[:spaces]))
            out.hang = len(self._indent(held[:spaces]))
            return spaces
        out.hang = 0 if self._line_style else out.column
        return match.end()

    def _indent(self, spaces: str) -> str:
        return spaces[: self._out.limit // 2]

    def _ruler(self, label: str) -> None:
        head = f"{self._line * 3} {label} " if label else ""
        width = min(self._out.limit, 40)
        self._out.verbatim(head[:width] + self._line * max(width - len(head), 0), DIM)
        self._out.newline()

    def _inline(self, *, final: bool) -> None:
        """Show the held text as far as its markers are decided."""
        while self._held:
            head = self._held[0]
            run = len(self._held) - len(self._held.lstrip(head)) if head in "*`" else 1
            if head in "*`\\" and run == len(self._held) and not final:
                return  # the next character decides
            rest, after = self._held[run:], self._held[run : run + 1]
            if head == "`":
                self._backticks(run)
            elif head == "*" and not self._ticks:
                self._stars(run, after)
            elif head == "\\" and not self._ticks and after and after in "*`_#":
                self._show(after)
                rest = rest[1:]
            else:
                self._show(head * run)
            self._held = rest

    def _backticks(self, run: int) -> None:
        if self._ticks == 0:
            self._ticks = run
        elif self._ticks == run:
            self._ticks = 0
        else:
            self._show("`" * run)

    def _stars(self, run: int, after: str) -> None:
        """Two stars (three: bold and a plain one) next to text switch bold; others are text, as in 2**3."""
        before = self._before
        closes = self._bold and before not in ("", " ")
        power = before.isascii() and before.isalnum()
        opens = not self._bold and after not in ("", " ") and not power
        if run in (2, 3) and (closes or opens):
            self._bold = not self._bold
            self._show("*" * (run - 2))
        else:
            self._show("*" * run)

    def _show(self, text: str) -> None:
        style = CODE if self._ticks else BOLD if self._bold or self._line_style else ""
        for char in text:
            self._out.put(char, style)
            self._before = char


def _append(segments: list[Segment], text: str, style: str) -> None:
    """Add text, to the last segment if it has the same style."""
    if segments and segments[-1].style == style:
        segments[-1] = Segment(segments[-1].text + text, style)
    elif text:
        segments.append(Segment(text, style))


def _cells(text: str) -> int:
    """The terminal's columns for the text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
