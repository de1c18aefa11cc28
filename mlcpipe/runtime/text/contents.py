"""A user's text is text: tells the messages' characters from the chat template's own in a rendered prompt.

Before rendering, the characters that begin and end control tokens (`<` and `>` of `<|im_end|>`) are replaced, in all
that the caller gives, by rare characters that occur nowhere in it. They pass through a template as any other
character would: trimmed, cut, joined, written as JSON. In the prompt, a control token made of a message's characters
then has a stand-in inside, wherever the template put it together, and one that the template wrote has none. A message
cannot write a stand-in: they are chosen after looking at it.

A template that looks for words of its own in a message (`'</think>' in content`) must find them: such words are left as
they are, unless they could be a part of a control token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.template_sandbox import STAND_INS

MIN_WORD = 3  # characters of a template's word; shorter ones are in every text


class ContentMarks:
    """Marks what callers give to a template whose control tokens are `control`."""

    def __init__(self, control: Collection[str]) -> None:
        texts = sorted((text for text in control if text.strip()), key=len, reverse=True)
        self.starts = starts = [text.lstrip() for text in texts]
        self._texts = "\0".join(starts)
        self._prefixes = {text[:cut] for text in starts for cut in range(1, len(text))}
        self._suffixes = {text[cut:] for text in starts for cut in range(1, len(text))}
        signs = [[char for char in text if not char.isalnum() and not char.isspace()] for text in texts]
        edges = {char for found in signs if found for char in (found[0], found[-1])}
        self.edges = frozenset(edges)
        self._letters = sorted(edges | {text[0] for text in starts})
        self._edge = re.compile(f"[{re.escape(''.join(sorted(edges)))}]") if edges else None
        # Ahead of the text, to find each start, also inside another control token.
        self._control = re.compile(f"(?={'|'.join(map(re.escape, starts))})") if starts else None

    def mark(self, value: Any, words: Iterable[str]) -> tuple[Any, dict[int, str]]:
        """A copy of plain JSON data with stand-ins, and what each of them stands for.

        `words` are the texts that the template compares with. Raises UsageError where no stand-in is left.
        """
        if self._control is None:
            return value, {}
        used = set().union(*map(set, _texts(value)))
        free = [chr(code) for code in STAND_INS if chr(code) not in used][: len(self._letters)]
        if len(free) < len(self._letters):
            raise UsageError(
                "the messages have too many kinds of signs",
                expected=f"{len(self._letters)} free ones of U+1D800 to U+1D9FF",
            )
        made = self._copy(value, self.own_words(words), dict(zip(self._letters, free, strict=True)))
        return made, {ord(stand_in): char for char, stand_in in zip(self._letters, free, strict=True)}

    def own_words(self, words: Iterable[str]) -> list[str]:
        """Those of a template's words that a message may write, since no control token can be made of them."""
        return [word for word in words if len(word) >= MIN_WORD and self._edges(word) and not self._meets(word)]

    def letters(self) -> list[tuple[str, bool]]:
        """The characters that are replaced, and whether everywhere: the others only at the start of a control token."""
        return [(letter, bool(self._edges(letter))) for letter in self._letters]

    def _copy(self, value: Any, words: list[str], stand_ins: dict[str, str]) -> Any:
        if isinstance(value, str):
            return self._marked(value, words, stand_ins)
        if isinstance(value, list):
            return [self._copy(part, words, stand_ins) for part in value]
        if isinstance(value, dict):
            return {
                self._name(key, stand_ins): self._name(part, stand_ins)
                if key in ("role", "type") and isinstance(part, str)
                else self._copy(part, words, stand_ins)
                for key, part in value.items()
            }
        return value

    def _name(self, text: str, stand_ins: dict[str, str]) -> str:
        """Templates compare names and sort them: they change only where they have a whole control token."""
        return text if text.isidentifier() else _replaced(text, self._controls(text), stand_ins)

    def _marked(self, text: str, words: list[str], stand_ins: dict[str, str]) -> str:
        places = self._edges(text)
        for word in words if places else ():
            for match in re.finditer(re.escape(word), text):
                places.difference_update(range(*match.span()))
        return _replaced(text, places | self._controls(text), stand_ins)

    def _meets(self, word: str) -> bool:
        """Whether a word could be a part of a control token, together with what is beside it."""
        cuts = range(1, len(word) + 1)
        begins = any(word[-cut:] in self._prefixes or word[:cut] in self._suffixes for cut in cuts)
        return begins or word in self._texts or bool(self._controls(word))

    def _edges(self, text: str) -> set[int]:
        return {match.start() for match in self._edge.finditer(text)} if self._edge else set()

    def _controls(self, text: str) -> set[int]:
        return {match.start() for match in self._control.finditer(text)} if self._control else set()


def _replaced(text: str, places: set[int], stand_ins: dict[str, str]) -> str:
    chars = list(text)
    for place in places:
        chars[place] = stand_ins[chars[place]]
    return "".join(chars) if places else text


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)
