"""Regular expressions as programs of the small backtracking matcher in `mlcpipe/native/runtime/text/pattern.h`.

The syntax is the part of Oniguruma's that published tokenizers use. Other syntax raises TokenizerError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlcpipe.compiler.text import code_points
from mlcpipe.compiler.text.code_points import Members
from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer_limits import class_end

UNBOUNDED = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Chars:
    """One character of a class."""

    members: Members


@dataclass(frozen=True)
class Text:
    """Literal characters."""

    text: str


@dataclass(frozen=True)
class Sequence_:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    branches: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`kind` is "greedy", "lazy" or "possessive"; `most` is UNBOUNDED without a limit."""

    body: Node
    least: int
    most: int
    kind: str


@dataclass(frozen=True)
class Look:
    """Lookahead: matches the following text without consuming it."""

    body: Node
    negative: bool


@dataclass(frozen=True)
class Atomic:
    body: Node


@dataclass(frozen=True)
class Edge:
    """A place: "line_begin", "line_end", "begin" or "end"."""

    kind: str


Node = Chars | Text | Sequence_ | Choice | Repeat | Look | Atomic | Edge

_QUANTIFIER = re.compile(r"(?:([*+?])([+?]?)|\{(\d+)(?:(,)(\d*))?\}(\??)|\{,(\d+)\}(\??))")
_ONE_OF_MANY = re.compile(
    r"\.|\\(?:[pP]\{\^?[\w -]+\}|x\{[0-9A-Fa-f]+\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[dDsSwWhHrntfav]|[^\w])"
)
_GROUP = re.compile(r"\((?:\?(i:|-i:|:|=|!|>|i\)))?(?!\?)")
_EDGES = {"^": "line_begin", "$": "line_end", "\\A": "begin", "\\z": "end"}


def parse(source: str) -> Node:
    """The pattern as a tree. Raises TokenizerError for syntax that is not covered."""
    node, at = _Parser(source).choice(0, False)
    if at != len(source):
        raise _refusal(source, at)
    return node


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source

    def choice(self, at: int, fold: bool) -> tuple[Node, int]:
        """`fold` ignores case."""
        branches = []
        while True:
            branch, at = self._sequence(at, fold)
            branches.append(branch)
            if self.source[at : at + 1] != "|":
                return branches[0] if len(branches) == 1 else Choice(tuple(branches)), at
            at += 1

    def _sequence(self, at: int, fold: bool) -> tuple[Node, int]:
        parts: list[Node] = []
        letters = ""
        while at < len(self.source) and self.source[at] not in "|)":
            if self.source.startswith("(?i)", at):
                node, at = self.choice(at + 4, True)  # up to the end of the group, branches included
                parts.append(node)
                break
            began = at
            node, at = self._atom(at, fold)
            letters += self.source[began:at] if fold else ""
            node, at = self._repeated(node, at)
            parts.append(node)
        if fold and any(fold in letters.casefold() for fold in _long_folds()):
            raise _refusal(self.source, at, "letters that are one letter in another case")
        return _joined(parts), at

    def _atom(self, at: int, fold: bool) -> tuple[Node, int]:
        source = self.source
        for text, kind in _EDGES.items():
            if source.startswith(text, at):
                return Edge(kind), at + len(text)
        if group := _GROUP.match(source, at):
            body, end = self.choice(group.end(), fold if group[1] not in ("i:", "-i:") else group[1] == "i:")
            if group[1] == "i)" or source[end : end + 1] != ")":
                raise _refusal(source, at)
            made: dict[str | None, Node] = {"=": Look(body, False), "!": Look(body, True), ">": Atomic(body)}
            return made.get(group[1], body), end + 1
        if source[at] == "[":
            end = _class_end(source, at)
            return self._class(source[at:end], fold), end
        if one := _ONE_OF_MANY.match(source, at):
            return self._class(one[0], fold), one.end()
        if source[at] in "\\()*+?":
            raise _refusal(source, at)
        return self._class(source[at], True) if fold else Text(source[at]), at + 1

    def _class(self, atom: str, fold: bool) -> Node:
        members = code_points.of_pattern(f"(?i:{atom})" if fold else atom)
        if fold and atom.startswith("[") and members[_folding()].any():
            raise _refusal(self.source, self.source.index(atom), "a class of letters that are several in another case")
        return Chars(members)

    def _repeated(self, node: Node, at: int) -> tuple[Node, int]:
        found = _QUANTIFIER.match(self.source, at)
        if not found:
            return node, at
        sign, suffix, least, comma, most, lazy, only_most, only_lazy = found.groups()
        if sign:
            kind = {"": "greedy", "?": "lazy", "+": "possessive"}[suffix]
            bounds = {"*": (0, UNBOUNDED), "+": (1, UNBOUNDED), "?": (0, 1)}[sign]
        elif only_most is not None:
            bounds, kind = (0, int(only_most)), "lazy" if only_lazy else "greedy"
        else:
            end = int(most) if most else UNBOUNDED if comma else int(least)
            bounds, kind = (int(least), end), "lazy" if lazy else "greedy"
            if not comma and lazy:  # in Oniguruma `{n}?` is an optional `{n}`
                raise _refusal(self.source, at)
        if isinstance(node, (Edge, Look)) or _QUANTIFIER.match(self.source, found.end()) or bounds[0] > bounds[1]:
            raise _refusal(self.source, at)
        return Repeat(node, *bounds, kind), found.end()


def _class_end(source: str, at: int) -> int:
    try:
        return class_end(source, at)
    except ValueError:
        raise _refusal(source, at) from None


def _joined(parts: Sequence[Node]) -> Node:
    """One node, with neighbouring characters as one text."""
    made: list[Node] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, Text) and isinstance(last, Text):
            made[-1] = Text(last.text + part.text)
        else:
            made.append(part)
    return made[0] if len(made) == 1 else Sequence_(tuple(made))


@lru_cache(maxsize=1)
def _long_folds() -> frozenset[str]:
    """Letter sequences that are one letter in another case, such as "ss"."""
    return frozenset(fold for char in map(chr, _folding()) if (fold := char.casefold()))


@lru_cache(maxsize=1)
def _folding() -> list[int]:
    return [code for code in range(0x20000) if len(chr(code).casefold()) > 1]  # none is further


def first(node: Node) -> tuple[Members, bool]:
    """The characters that a match can begin with, and whether a match can be empty."""
    if isinstance(node, Chars):
        return node.members, False
    if isinstance(node, Text):
        return (code_points.of_codes(ord(node.text[0])), False) if node.text else (code_points.of_codes([]), True)
    if isinstance(node, Choice):
        found = [first(branch) for branch in node.branches]
        return np.logical_or.reduce([members for members, _ in found]), any(empty for _, empty in found)
    if isinstance(node, Sequence_):
        members = code_points.of_codes([])
        for part in node.parts:
            begins, empty = first(part)
            members = members | begins
            if not empty:
                return members, False
        return members, True
    if isinstance(node, Repeat):
        members, empty = first(node.body)
        return members, empty or node.least == 0
    if isinstance(node, Atomic):
        return first(node.body)
    return code_points.of_codes([]), True


def _refusal(source: str, at: int, found: str = "") -> TokenizerError:
    return TokenizerError(
        "a regular expression that the native tokenizer does not know",
        where="tokenizer.json",
        found=f"{found or source[at : at + 20]!r} in {source[:200]!r}",
        next_step="use the tokenizer of the original model",
    )
