"""Programs of the matcher in `mlcpipe/native/runtime/text/pattern.h`: instructions, classes, and where to begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.compiler.text import code_points
from mlcpipe.compiler.text.code_points import Members
from mlcpipe.compiler.text.patterns import (
    UNBOUNDED,
    Chars,
    Choice,
    Edge,
    Look,
    Node,
    Repeat,
    Sequence_,
    Text,
    first,
    parse,
)
from mlcpipe.errors import TokenizerError

PAGE = 256
MAX_COPIES = 64  # of a group in a counted repetition
MAX_INSTRUCTIONS = 10_000

# As `enum Op` of pattern.h.
_OPS = (
    *("match", "fail", "char", "class", "greedy", "lazy", "possessive", "split", "jump", "look", "look_not", "atomic"),
    *("line_begin", "line_end", "begin", "end"),
)


class PatternPrograms:
    """The patterns of one tokenizer; they share their classes."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int]] = []
        self._starts: list[NDArray[np.uint32]] = []
        self._classes: list[Members] = []
        self._class_of: dict[bytes, int] = {}

    def add(self, pattern: str | Node) -> int:
        """The number of a pattern. Raises TokenizerError for unsupported syntax."""
        node = parse(pattern) if isinstance(pattern, str) else pattern
        branches = node.branches if isinstance(node, Choice) else (node,)
        firsts = [first(branch) for branch in branches]
        if any(empty for _, empty in firsts):
            raise TokenizerError("a pattern that can match nothing", where="tokenizer.json", found=repr(pattern)[:200])
        begins = []
        for branch in branches:
            begins.append(len(self._code))
            self._emit(branch)
            self._put("match")
        fitting = np.array([_by_first_byte(members) for members, _ in firsts])
        chains: dict[bytes, int] = {}
        starts = np.zeros(256, np.uint32)
        for byte in range(256):
            key = fitting[:, byte].tobytes()
            if key not in chains:
                chains[key] = self._chain([at for at, fits in zip(begins, fitting[:, byte], strict=True) if fits])
            starts[byte] = chains[key]
        if len(self._code) > MAX_INSTRUCTIONS:
            raise TokenizerError("a pattern that is too long", where="tokenizer.json", found=repr(pattern)[:200])
        self._starts.append(starts)
        return len(self._starts) - 1

    def add_class(self, members: Members) -> int:
        """The number of a class of code points."""
        key = np.packbits(members, bitorder="little").tobytes()
        if key not in self._class_of:
            self._class_of[key] = len(self._classes)
            self._classes.append(members)
        return self._class_of[key]

    def sections(self) -> list[NDArray[Any]]:
        """Instructions, starts of patterns by first byte, pages of each class, and pages as bits."""
        pages: dict[bytes, int] = {}
        index = []
        for members in self._classes:
            rows = np.packbits(members.reshape(-1, PAGE), axis=1, bitorder="little")
            index += [pages.setdefault(row.tobytes(), len(pages)) for row in rows]
        code = np.array(self._code, np.uint32).reshape(-1)
        starts = np.array(self._starts, np.uint32).reshape(-1)
        return [code, starts, np.array(index, np.uint16), np.frombuffer(b"".join(pages), "<u4")]

    def _put(self, op: str, a: int = 0, b: int = 0, c: int = 0) -> int:
        self._code.append((_OPS.index(op), a, b, c))
        return len(self._code) - 1

    def _chain(self, begins: list[int]) -> int:
        """Tries branches in order."""
        if not begins:
            return self._put("fail")
        if len(begins) == 1:
            return begins[0]
        at = len(self._code)
        for begin in begins[:-1]:
            self._put("split", begin, len(self._code) + 1)
        self._put("jump", begins[-1])
        return at

    def _emit(self, node: Node) -> None:
        if isinstance(node, Chars):
            self._put("class", self.add_class(node.members))
        elif isinstance(node, Text):
            for char in node.text:
                self._put("char", ord(char))
        elif isinstance(node, Sequence_):
            for part in node.parts:
                self._emit(part)
        elif isinstance(node, Choice):
            self._choice([*node.branches])
        elif isinstance(node, Repeat):
            self._repeat(node)
        elif isinstance(node, Edge):
            self._put(node.kind)
        elif isinstance(node, Look):
            self._inside("look_not" if node.negative else "look", node.body)
        else:
            self._inside("atomic", node.body)

    def _inside(self, op: str, body: Node) -> None:
        """A separate program that ends with a match; the outer one continues after it."""
        at = self._put(op)
        self._emit(body)
        self._put("match")
        self._patch(at, len(self._code))

    def _patch(self, at: int, a: int | None = None, b: int | None = None) -> None:
        op, old_a, old_b, c = self._code[at]
        self._code[at] = (op, old_a if a is None else a, old_b if b is None else b, c)

    def _choice(self, branches: list[Node]) -> None:
        jumps = []
        for branch in branches[:-1]:
            split = self._put("split", len(self._code) + 1)
            self._emit(branch)
            jumps.append(self._put("jump"))
            self._patch(split, b=len(self._code))
        self._emit(branches[-1])
        for jump in jumps:
            self._patch(jump, len(self._code))

    def _repeat(self, node: Repeat) -> None:
        body = node.body
        if isinstance(body, Text) and len(body.text) == 1:
            body = Chars(code_points.of_codes(ord(body.text)))
        if isinstance(body, Chars):
            self._put(node.kind, self.add_class(body.members), node.least, node.most)
            return
        if node.kind == "possessive":
            self._inside("atomic", Repeat(body, node.least, node.most, "greedy"))
            return
        copies = node.least if node.most == UNBOUNDED else node.most
        if first(body)[1] or copies > MAX_COPIES:
            raise TokenizerError("a repetition that the native tokenizer does not know", where="tokenizer.json")
        for _ in range(node.least):
            self._emit(body)
        greedy = node.kind == "greedy"
        if node.most == UNBOUNDED:
            split = self._split()
            self._emit(body)
            self._put("jump", split)
            self._leave([split], greedy)
            return
        splits = []
        for _ in range(node.most - node.least):
            splits.append(self._split())
            self._emit(body)
        self._leave(splits, greedy)

    def _split(self) -> int:
        after = len(self._code) + 1
        return self._put("split", after, after)

    def _leave(self, splits: list[int], greedy: bool) -> None:
        for split in splits:
            self._patch(split, **{"b" if greedy else "a": len(self._code)})


def literal(text: str) -> Node:
    """The pattern of a literal text."""
    return Text(text)


def one_of(members: Members, least: int = 1, most: int = 1) -> Node:
    """The pattern of some characters of a class."""
    return Repeat(Chars(members), least, most, "greedy")


def _by_first_byte(members: Members) -> NDArray[np.bool_]:
    """The first UTF-8 bytes of the characters."""
    bytes_ = np.zeros(256, np.bool_)
    bytes_[:128] = members[:128]
    for first_code, shift, lead, count in ((0x80, 6, 0xC0, 32), (0x800, 12, 0xE0, 16), (0x10000, 18, 0xF0, 5)):
        for index in range(count):
            codes = slice(max(index << shift, first_code), min((index + 1) << shift, code_points.COUNT))
            bytes_[lead + index] = codes.start < codes.stop and members[codes].any()
    return bytes_
