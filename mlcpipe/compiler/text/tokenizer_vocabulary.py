"""The model of a tokenizer.json as tables: merges, words, characters, and the decoded text of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.compiler.text.hash_tables import EMPTY, hash_numbers, hash_texts, slots
from mlcpipe.compiler.text.tables import strings
from mlcpipe.compiler.text.tokenizer_steps import refusal
from mlcpipe.runtime.text.token_bytes import byte_level_table
from mlcpipe.runtime.text.tokenizer import Tokenizer

# Flags of a token.
KNOWN, SKIPPED, BYTE, CONTROL, ENDS = 1, 2, 4, 8, 16

Section = bytes | NDArray[Any]


class Vocabulary:
    """A byte pair encoding. Raises TokenizerError for another model, or an option that is not covered.

    `byte_level` maps the bytes of a text to the characters of GPT-2's table.
    """

    def __init__(self, tokenizer: Tokenizer, model: Mapping[str, Any], byte_level: bool) -> None:
        if model["type"] != "BPE":
            raise refusal("model", model["type"])
        for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(option):
                raise refusal("model", f"BPE with {option}")
        self._tokenizer = tokenizer
        self._model = model
        self._byte_level = byte_level
        self._table = byte_level_table()
        self._ids: dict[str, int] = model["vocab"]
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
        self._merges = [(left, right, left + right) for left, right in pairs]
        self.unknown = self._ids.get(model["unk_token"], EMPTY) if model["unk_token"] is not None else EMPTY

    def merges(self) -> NDArray[np.uint32]:
        """Slots with left, right, rank and merged token; left is EMPTY where there is none."""
        last = {(self._ids[a], self._ids[b]): (rank, self._ids[ab]) for rank, (a, b, ab) in enumerate(self._merges)}
        rows = np.array([(*pair, *merged) for pair, merged in last.items()], np.uint32).reshape(-1, 4)
        return _table(rows, hash_numbers(rows[:, 0], rows[:, 1]))

    def words(self) -> list[Section]:
        """Slots with the ids of tokens that their own text encodes to, and their texts by id.

        Texts that equal the decoded ones are left out.
        """
        library = self._tokenizer.library.model
        texts = {
            index: text
            for key, index in self._ids.items()
            if key
            and (text := self._key(key)) is not None
            and (self._model["ignore_merges"] or [token.id for token in library.tokenize(key)] == [index])
        }
        ids = np.array(list(texts), np.uint32)
        table = slots(hash_texts(list(texts.values())))
        found = np.where(table == EMPTY, EMPTY, ids[np.minimum(table, max(len(ids) - 1, 0))] if len(ids) else EMPTY)
        if self._byte_level:
            return [found.astype(np.uint32), np.zeros(0, np.uint32), b""]
        return [found.astype(np.uint32), *strings(texts.get(index, b"") for index in range(self._tokenizer.vocab_size))]

    def characters(self) -> NDArray[np.uint32]:
        """Slots with a code point and its token; empty for byte-level models."""
        found = {} if self._byte_level else {ord(key): index for key, index in self._ids.items() if len(key) == 1}
        rows = np.array(list(found.items()), np.uint32).reshape(-1, 2)
        return _table(rows, hash_numbers(rows[:, 0]))

    def bytes_(self) -> NDArray[np.uint32]:
        """The token of each byte: of a byte-level model's text, or of the byte fallback."""
        if self._byte_level:
            names = sorted(self._table, key=lambda char: self._table[char])
        else:
            names = [f"<0x{byte:02X}>" if self._model["byte_fallback"] else "" for byte in range(256)]
        return np.array([self._ids.get(name, EMPTY) if name else EMPTY for name in names], np.uint32)

    def pieces(self) -> list[Section]:
        """Flags of each token, its bytes in decoded text, and those of a first token if the decoder drops some."""
        tokenizer = self._tokenizer
        first: list[bytes] = []
        pieces: list[bytes] = []
        flags = np.zeros(tokenizer.vocab_size, np.uint8)
        control = tokenizer.control_token_ids
        for index in range(tokenizer.vocab_size):
            token = tokenizer.library.id_to_token(index)
            piece = None if token is None else tokenizer.rules.piece(token)
            pieces.append(piece.data if piece else b"")
            if token is None or piece is None:
                first.append(b"")
                continue
            first.append(tokenizer.rules.piece(token, first=True).data)
            skipped = tokenizer.piece(index) is None
            flags[index] = KNOWN | SKIPPED * skipped | BYTE * piece.is_byte | CONTROL * (index in control)
            flags[index] |= ENDS * (index in tokenizer.eos_token_ids)
        drops = tokenizer.rules.drop_first
        return [flags, *strings(pieces), *(strings(first) if drops else (np.zeros(0, np.uint32), b""))]

    def _key(self, token: str) -> bytes | None:
        """The bytes of the text that encodes to this token; None for none."""
        if not self._byte_level:
            return token.encode()
        table = self._table
        return bytes(table[char] for char in token) if all(char in table for char in token) else None

    def word_start(self) -> tuple[int, list[int]]:
        """A character before which a text can be cut, except after characters that a merge joins it to.

        EMPTY for none: tokens with another text than their own hide such pairs.
        """
        char = "\N{LOWER ONE EIGHTH BLOCK}"
        hidden = {self._model["unk_token"], *(f"<0x{byte:02X}>" for byte in range(256))}
        hides = any(left in hidden or right in hidden for left, right, _ in self._merges)
        if self._byte_level or self._model["ignore_merges"] or hides or char not in self._ids:
            return EMPTY, []
        joined = [merged for _, _, merged in self._merges if char in merged[1:]]
        return ord(char), sorted({ord(one) for text in joined for one, next_ in pairwise(text) if next_ == char})


def _table(rows: NDArray[np.uint32], hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    table = slots(hashes)
    made = np.full((len(table), rows.shape[1]), EMPTY, np.uint32)
    made[table != EMPTY] = rows[table[table != EMPTY]]
    return made.reshape(-1)
