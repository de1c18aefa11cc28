"""Encodes a prompt whose template may write control tokens and whose messages may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import tokenizers

Encode = Callable[[tokenizers.Tokenizer, str], tokenizers.Encoding]
Span = tuple[int, int]


class LiteralEncoder:
    """`control` has the text of each control token by its id."""

    def __init__(self, library: tokenizers.Tokenizer, control: Mapping[int, str], encode: Encode) -> None:
        self.control = dict(control)
        self._library = library
        self._encode = encode
        self._added = library.get_added_tokens_decoder()
        # These may be spelled otherwise in a text.
        self.normalized = {
            token.content for index, token in self._added.items() if token.normalized and index in control
        }

    def encode(self, marked: str, stand_ins: Mapping[int, str]) -> list[int]:
        """Ids of a prompt with stand-ins for characters of messages (`contents.py`).

        A prompt in which no message wrote a control token is encoded as a whole: merges and spaces run over the
        borders of messages. Otherwise it is cut at the template's control tokens, and the parts in which a message
        wrote one are encoded without any. A tokenizer that puts a space before a text may do so before such a part.
        """
        text = marked.translate(stand_ins)
        encoding = self._encode(self._library, text)
        if marked == text and not self.normalized:
            return list(encoding.ids)
        forged = [
            (start, end)
            for start, end, token in self._spans(encoding)
            if token not in marked[start:end] and (token in text[start:end] or token in self.normalized)
        ]
        if not forged:
            return list(encoding.ids)
        ids: list[int] = []
        done = after = 0  # where the text without ids yet begins, and the part after the last control token
        ours = self._spans(self._encode(self._library, marked))
        for start, end in [*((a, b) for a, b, token in ours if token in marked[a:b]), (len(text), len(text))]:
            if any(after <= first < start for first, _ in forged):
                ids += self._ids(text[done:after]) + self.plain_ids(text[after:start])
                done = start
            after = end
        return ids + self._ids(text[done:])

    def _spans(self, encoding: tokenizers.Encoding) -> list[tuple[int, int, str]]:
        """Places of control tokens, and their texts."""
        found = [(index, self.control[token]) for index, token in enumerate(encoding.ids) if token in self.control]
        offsets = encoding.offsets if found else []
        return [(*offsets[index], token) for index, token in found]

    def _ids(self, text: str) -> list[int]:
        return list(self._encode(self._library, text).ids) if text else []

    def plain_ids(self, text: str) -> list[int]:
        """Ids of `text` without control tokens. One that is a piece of the vocabulary too is cut in two."""
        if not text:
            return []
        encoding = self._encode(self.plain, text)
        cuts = [(start, end) for start, end, token in self._spans(encoding) if token in text[start:end]]
        if not cuts:
            return list(encoding.ids)
        ids: list[int] = []
        begin = 0
        for start, end in [*cuts, (len(text), len(text) + 2)]:
            # A control token of one character has no other spelling: it is left out.
            ids += self.plain_ids(text[begin : start + (end - start > 1)])
            begin = start + 1
        return ids

    @cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """The tokenizer, sharing the model in memory, that treats control tokens as text."""
        plain = tokenizers.Tokenizer(self._library.model)
        plain.encode_special_tokens = True
        for step in ("normalizer", "pre_tokenizer"):
            if getattr(self._library, step) is not None:
                setattr(plain, step, getattr(self._library, step))
        for index, token in sorted(self._added.items()):
            add = plain.add_special_tokens if index in self.control else plain.add_tokens
            add([token])
        same = all(plain.token_to_id(token.content) == index for index, token in self._added.items())
        return plain if same else self._library
