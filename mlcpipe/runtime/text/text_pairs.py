"""Texts, and pairs of texts, as encoders take them: with special tokens around them, cut where they are too long."""

from __future__ import annotations

from dataclasses import dataclass

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedText:
    """A text's token ids, and their token types. The first `skipped` ones are a prompt that does not count."""

    ids: list[int]
    types: list[int]
    skipped: int = 0


def encode_text(
    tokenizer: Tokenizer, text: str, limit: int, pair: str | None = None, *, cut: bool = False
) -> EncodedText:
    """A text, or two that belong together, with special tokens around them.

    With `cut`, tokens beyond `limit` are cut from the end of the longer one; else UsageError names their number.
    Raises TokenizerError.
    """
    parts = [tokenizer.encoding(one) for one in (text, pair) if one is not None]
    library = tokenizer.library
    room = limit - library.num_special_tokens_to_add(pair is not None)
    lengths = [len(part.ids) for part in parts]
    if sum(lengths) > room:
        if not cut or room < len(parts):
            raise too_long(sum(lengths) + limit - room, limit)
        for part, length in zip(parts, _cut(lengths, room)):
            part.truncate(length)
    whole = library.post_process(parts[0], parts[1] if pair is not None else None, add_special_tokens=True)
    if not whole.ids:
        raise UsageError("the text", expected="at least one token", found="none")
    return EncodedText(tokenizer.with_rows(whole.ids), whole.type_ids)


def too_long(tokens: int, limit: int) -> UsageError:
    """The error for a text of more tokens than a chunk."""
    return UsageError(
        "the text is too long", expected=f"at most {limit} tokens", found=tokens,
        next_step="shorten it, or ask for it to be cut",
    )  # fmt: skip


def _cut(lengths: list[int], room: int) -> list[int]:
    """The remaining length of each text: the longer one is cut first."""
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]
