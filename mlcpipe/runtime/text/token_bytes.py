"""The bytes that one token stands for, read from the `decoder` of a tokenizer.json.

`tokenizers.decoders.DecodeStream` (0.23.3) drops a character that ends the text incomplete, and a U+FFFD there. It
raises "Invalid prefix" for `<0x7B> <0x9B> c`, which decodes as two U+FFFD and "c". Log-probabilities also need the
bytes of single tokens. So the decoder is read here as rules on single tokens. Three families cover today's models:

* byte-level BPE (GPT-2, Llama-3, Qwen): each character of a token is one byte, by GPT-2's table;
* SentencePiece-like (Llama-2, Mistral, Gemma, T5): U+2581 is a space, and the space that starts a text is dropped;
* byte fallback: the token `<0x0A>` is the byte 10; a run of such tokens is one UTF-8 string.

Source of the rules: the decoders of https://github.com/huggingface/tokenizers (`tokenizers/src/decoders/`).
A decoder whose result depends on more than this is refused at load, never approximated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlcpipe.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_KNOWN = "ByteLevel, Metaspace, or a Sequence of Replace, Metaspace, ByteFallback, Fuse and Strip"


def byte_level_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


@dataclass(frozen=True)
class Piece:
    """A token's part of the decoded text: `data`, and whether it is one byte of a byte-fallback run."""

    data: bytes
    is_byte: bool = False


@dataclass(frozen=True)
class DecoderRules:
    """How tokens become text.

    replacements   (old, new) pairs applied to each token, in order
    metaspace      the character that stands for a space, "" for none
    drop_first     whether the first token of a text loses its metaspaces
    byte_level     GPT-2's table; `byte_table` is empty where it is not used
    byte_fallback  tokens `<0x..>` are bytes
    strip          (character, count): dropped from the start of the whole text
    separator      put between tokens (a tokenizer without a decoder joins them with spaces)
    """

    replacements: tuple[tuple[str, str], ...] = ()
    metaspace: str = ""
    drop_first: bool = False
    byte_table: Mapping[str, int] | None = None
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)
    separator: str = ""

    def piece(self, token: str, *, first: bool = False) -> Piece:
        """The share of `token`; `first` for the first token of a text. Strip and separator are left to the caller."""
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.metaspace:
            token = token.replace(self.metaspace, "" if first and self.drop_first else " ")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return Piece(bytes([int(match[1], 16)]), is_byte=True)
        if self.byte_table is not None:
            table = self.byte_table
            if all(char in table for char in token):
                return Piece(bytes(table[char] for char in token))
        return Piece(token.encode("utf-8"))


def parse_decoder(state: Mapping[str, Any] | None) -> DecoderRules:
    """Reads the `decoder` object of a tokenizer.json (None where it has none). Raises TokenizerError."""
    if state is None:
        return DecoderRules(separator=" ")
    stages = _flatten(state)
    rules = DecoderRules()
    fused = False
    for position, stage in enumerate(stages):
        kind = stage.get("type")
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and (fused or rules.byte_table is not None):
            rules = _add_strip(rules, stage)
        elif fused or rules.byte_fallback or rules.byte_table is not None:
            # Anything else would see text that spans tokens.
            raise _refusal(stages, position)
        elif kind == "ByteLevel":
            rules = replace(rules, byte_table=byte_level_table())
        elif kind == "ByteFallback":
            rules = replace(rules, byte_fallback=True)
        elif kind == "Metaspace" and not rules.metaspace:
            drop = stage.get("prepend_scheme", "always") != "never"
            rules = replace(rules, metaspace=str(stage.get("replacement", "▁")), drop_first=drop)
        elif kind == "Replace" and not rules.metaspace and isinstance(_pattern(stage), str):
            pair = (str(_pattern(stage)), str(stage.get("content", "")))
            rules = replace(rules, replacements=(*rules.replacements, pair))
        else:
            raise _refusal(stages, position)
    return rules


def _flatten(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state.get("type") != "Sequence":
        return [state]
    return [stage for inner in state.get("decoders", []) for stage in _flatten(inner)]


def _pattern(stage: Mapping[str, Any]) -> str | None:
    pattern = stage.get("pattern")
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    return literal if isinstance(literal, str) and literal else None


def _add_strip(rules: DecoderRules, stage: Mapping[str, Any]) -> DecoderRules:
    content, start, stop = stage.get("content"), stage.get("start", 0), stage.get("stop", 0)
    if stop or rules.strip[1] or not isinstance(content, str) or len(content) != 1:
        raise TokenizerError(
            "the decoder's Strip cannot be streamed",
            where="tokenizer.json",
            expected="one Strip of one character at the start",
            found=dict(stage),
        )
    return replace(rules, strip=(content, int(start)))


def _refusal(stages: list[Mapping[str, Any]], position: int) -> TokenizerError:
    kinds = [str(stage.get("type")) for stage in stages]
    return TokenizerError(
        f"decoder {kinds[position]} at this place cannot be streamed",
        where="tokenizer.json",
        expected=_KNOWN,
        found=" > ".join(kinds),
        next_step="use a checkpoint whose tokenizer is byte-level BPE or SentencePiece-like",
    )
