r"""Regular expressions of texts as rules in Lark of the same texts inside a JSON string.

A lexer that does not go back cannot tell whether `\` begins one more character of a lexeme or what follows it. So no
lexeme here has an escape among others: an expression is the texts without an escape, or a prefix without one, an
escape, and the texts that may follow. Those continuations are partial derivatives (Antimirov 1996), of which there
are no more than atoms. Atoms and flags are those of Rust's `regex`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mlcpipe.errors import UsageError

_MAX_ESCAPES = 24  # atoms of an expression that may be escapes, copies by {m,n} included
_MAX_DEPTH = 16  # of groups
_MAX_RULES, _MAX_CHARS = 256, 256 << 10  # of a grammar
_SHORT = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f", '"': '"', "\\": "\\"}
ESCAPED = (*map(chr, range(32)), '"', "\\", "\x7f")
_PLAIN = tuple(chr(code) for code in range(32, 127) if chr(code) not in ESCAPED)
_SAFE = r'[^\x00-\x1f"\\\x7f]'
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_ATOMS = re.compile(
    r"""(?P<class>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<group>\((?:\?(?:P?<\w+>|(?P<flags>[a-zA-Z-]*)(?P<ends>[:)])))?)
    |(?P<hex>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]{1,6}\}))
    |(?P<property>\\[pP](?:\{[^{}]*\}|\w))
    |(?P<escape>\\.)
    |(?P<times>[*+?]|\{(?P<least>\d{1,6})(?P<to>,(?P<most>\d{0,6}))?\})
    |(?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Atom:
    """One character or more: an expression of those without an escape, None for none, and the others."""

    safe: str | None
    chars: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Cat:
    """Parts in turn."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Alt:
    """One of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Star:
    """Any number of a part."""

    part: Node


Node = Atom | Cat | Alt | Star
Split = tuple[str, frozenset[str], Node]  # a prefix, an escape, what follows


def parsed(regex: str, flags: str = "") -> Node:
    """A regular expression. Raises UsageError for one that cannot be inside JSON."""
    if set(flags) & set("xu"):
        raise _refused(regex, "no flags x and u")
    reader = _Reader(regex, frozenset(flags))
    node = reader.alternatives()
    if reader.at is not None:
        raise _refused(regex, "no bracket without its partner")
    _check_escapes(node, 1, regex)
    return node


def escape(char: str) -> str:
    r"""A character as JSON writes it, a control character without a short form as \u00XX."""
    if char in _SHORT:
        return f"\\{_SHORT[char]}"
    return f"\\u{ord(char):04x}" if char in ESCAPED else char


@dataclass
class Rules:
    """Rules of expressions, with names that begin with `prefix`; equal ones share a rule."""

    prefix: str
    lines: list[str] = field(default_factory=list)
    _names: dict[Node, str] = field(default_factory=dict)
    _chars: int = 0

    def named(self, node: Node) -> str:
        """A rule or lexeme of an expression. Raises UsageError for one without a text."""
        if node in self._names:
            return self._names[node]
        pieces = _merged(_split(node))
        safe = _safe(node)
        if not pieces:
            if safe is None:
                raise UsageError("an expression of the grammar", expected="one that some text matches")
            return _lexeme(safe)
        self._chars += sum(len(prefix) + len(chars) for prefix, chars, _ in pieces) + len(safe or "")
        if len(self._names) >= _MAX_RULES or self._chars > _MAX_CHARS:
            raise UsageError(
                "the expressions of the grammar", next_step="use fewer, or shorter ones",
                expected=f"at most {_MAX_RULES} rules and {_MAX_CHARS} characters inside JSON",
            )  # fmt: skip
        name = self._names[node] = f"{self.prefix}{len(self._names)}"
        again = [_before(prefix, chars) for prefix, chars, rest in pieces if rest == node]
        ends = [] if safe is None else [_lexeme(safe)]
        for prefix, chars, rest in pieces:
            if rest != node:
                ends.append(f"{_before(prefix, chars)} {'' if rest == Cat() else self.named(rest)}")
        loop = f"({' | '.join(again)})* " if again else ""
        self.lines.append(f"{name}: {loop}({' | '.join(ends)})")
        return name


def _lexeme(safe: str) -> str:
    return f"/{safe}/" if safe else '""'


def _before(prefix: str, chars: Iterable[str]) -> str:
    written = "|".join(sorted(re.escape(escape(char)) for char in chars))
    return f"{f'/{prefix}/ ' if prefix else ''}/{written}/"


def _merged(pieces: Iterable[Split]) -> list[Split]:
    """With the escapes of equal prefixes and continuations together."""
    found: dict[tuple[str, Node], frozenset[str]] = {}
    for prefix, chars, rest in pieces:
        found[prefix, rest] = found.get((prefix, rest), frozenset()) | chars
    return [(prefix, chars, rest) for (prefix, rest), chars in found.items()]


def _safe(node: Node) -> str | None:
    """The texts without an escape, None for none."""
    if isinstance(node, Atom):
        return node.safe
    if isinstance(node, Star):
        inner = _safe(node.part)
        return f"(?:{inner})*" if inner else ""
    parts = [_safe(one) for one in node.parts]
    if isinstance(node, Cat):
        return None if None in parts else "".join(one for one in parts if one)
    some = [one for one in parts if one is not None]
    return f"(?:{'|'.join(some)})" if some else None


def _split(node: Node) -> Iterator[Split]:
    """The texts with an escape."""
    if isinstance(node, Atom):
        if node.chars:
            yield "", node.chars, Cat()
    elif isinstance(node, Alt):
        for one in node.parts:
            yield from _split(one)
    elif isinstance(node, Star):
        begin = _safe(node)
        for prefix, chars, rest in _split(node.part):
            yield f"{begin}{prefix}", chars, cat(rest, node)
    else:
        before = ""
        for index, one in enumerate(node.parts):
            for prefix, chars, rest in _split(one):
                yield f"{before}{prefix}", chars, cat(rest, *node.parts[index + 1 :])
            if (safe := _safe(one)) is None:
                return
            before += safe


def cat(*parts: Node) -> Node:
    """Parts in turn, flat."""
    flat: list[Node] = []
    for one in parts:
        flat += one.parts if isinstance(one, Cat) else [one]
    return flat[0] if len(flat) == 1 else Cat(tuple(flat))


class _Reader:
    """Reads an expression; `at` is the atom at hand, None at the end."""

    def __init__(self, regex: str, flags: frozenset[str]) -> None:
        self._regex, self._flags, self._depth = regex, flags, 0
        self._left = _ATOMS.finditer(regex)
        self.at = next(self._left, None)

    def _next(self) -> None:
        self.at = next(self._left, None)

    def alternatives(self) -> Node:
        """Up to a closing bracket."""
        flags, parts = self._flags, [self._sequence()]
        while self.at is not None and self.at[0] == "|":
            self._next()
            parts.append(self._sequence())
        self._flags = flags
        return parts[0] if len(parts) == 1 else Alt(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at is not None and self.at[0] not in ("|", ")"):
            made = self._one()
            if made is not None:
                parts.append(self._repeated(made))
        return cat(*parts)

    def _one(self) -> Node | None:
        """An atom or a group; None for flags."""
        at = self.at
        assert at is not None
        self._next()
        if not at["group"]:
            return self._atom(at)
        if at["flags"] is None and self._regex[at.end() :].startswith("?"):
            raise _refused(self._regex, "no groups that look ahead or behind")
        on, _, off = (at["flags"] or "").partition("-")
        if set(on + off) - set("ims"):
            raise _refused(self._regex, "the flags i, m and s")
        outer, self._flags = self._flags, (self._flags | set(on)) - set(off)
        if at["ends"] == ")":
            return None
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused(self._regex, f"at most {_MAX_DEPTH} groups in groups")
        inner = self.alternatives()
        self._flags, self._depth = outer, self._depth - 1
        if self.at is None:
            raise _refused(self._regex, "no bracket without its partner")
        self._next()
        return inner

    def _repeated(self, node: Node) -> Node:
        if self.at is None or not self.at["times"]:
            return node
        at = self.at
        self._next()
        if self.at is not None and self.at["times"]:
            raise _refused(self._regex, "one sign for how often")
        if at[0] in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[at[0]]
        else:
            least, most = int(at["least"]), int(at["most"]) if at["most"] else None if at["to"] else int(at["least"])
        if not any(True for _ in _split(node)):
            return Atom(f"(?:{_safe(node)}){at[0]}")
        if most is not None and most < least:
            raise _refused(self._regex, "the least number before the most")
        _check_escapes(node, max(least, most or 1), self._regex)
        rest: Node = Star(node) if most is None else Cat()
        for _ in range((most or least) - least):
            rest = Alt((Cat(), cat(node, rest)))
        return cat(*[node] * least, rest)

    def _atom(self, at: re.Match[str]) -> Node:
        text = at[0]
        if at["class"]:
            return self._class(text)
        if at["times"]:
            raise _refused(self._regex, "something before a sign for how often")
        if text == ".":
            return Atom(_SAFE, frozenset(ESCAPED if "s" in self._flags else {*ESCAPED} - {"\n"}))
        if at["property"] or (at["escape"] and text[1] in "dwsDWS"):
            return self._class(f"[{text}]")
        if at["hex"]:
            char = chr(int(re.sub(r"[^0-9a-fA-F]", "", text[2:]), 16) % 0x110000)
        else:
            char = _CONTROL.get(text[1], text[1]) if at["escape"] else text
        if at["escape"] and char.isalnum() or not at["escape"] and text in "^$":
            raise _refused(self._regex, f"no {text}")
        if char in ESCAPED:
            return Atom(None, frozenset(char))
        return Atom(f"(?i:{text})" if "i" in self._flags and char.isalpha() else text)

    def _class(self, text: str) -> Node:
        """A class of characters."""
        if re.search(r"&&|--|~~|\\[pP]", text) or "[" in re.sub(r"\\.", "", text[1:], flags=re.DOTALL):
            raise _refused(text, "classes of characters and ranges")
        plain = re.sub(r"\\[xu]\{([0-9a-fA-F]{1,6})\}", lambda one: f"\\U{int(one[1], 16) % 0x110000:08x}", text)
        try:
            pattern = re.compile(plain, re.ASCII)
        except (re.error, OverflowError) as error:
            raise _refused(text, "classes of characters and ranges") from error
        chars = frozenset(filter(pattern.fullmatch, ESCAPED))
        if not chars:
            return Atom(f"(?i:{text})" if "i" in self._flags else text)
        codes = [int(found, 16) for found in re.findall(r"\\[xu]\{?([0-9a-fA-F]{1,6})", text)]
        beyond = text.startswith("[^") or max([*codes, *map(ord, text)]) >= 128
        some = beyond or any(map(pattern.fullmatch, _PLAIN))
        safe = f"[{text}&&{_SAFE}]" if some else None
        return Atom(f"(?i:{safe})" if safe and "i" in self._flags else safe, chars)


def _check_escapes(node: Node, copies: int, regex: str) -> None:
    """Raises UsageError for an expression with too many characters that may be escaped."""
    left, count = [node], 0
    while left:
        one = left.pop()
        if isinstance(one, Atom):
            count += bool(one.chars) * copies
        else:
            left += [one.part] if isinstance(one, Star) else one.parts
        if count > _MAX_ESCAPES:
            raise _refused(regex, f"at most {_MAX_ESCAPES} places for quotes, backslashes and line ends")


def _refused(regex: str, expected: str) -> UsageError:
    return UsageError("an expression inside JSON", expected=expected, found=regex[:60])
