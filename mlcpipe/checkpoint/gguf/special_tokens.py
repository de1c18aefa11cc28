"""The special tokens of a GGUF file: their ids, which of them end an answer, and which strip adjacent white space.

The file names few of them. The rest follows its readers' rules, llama.cpp's (src/llama-vocab.cpp) unless noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.errors import TokenizerError

PREFIX = "tokenizer.ggml."
UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(2, 7)  # 0: not said, 1: normal
# Tokens that end an answer in any vocabulary that has them.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
# Names of ids that end an answer; for one that the file does not name, the first of these texts that exists.
_END_IDS = {
    "eos": (),
    "eot": (),
    "eom": (),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Defaults for SentencePiece's vocabularies, if the file does not name them: the ids, and the type of such a token.
_DEFAULTS = {"bos": (1, CONTROL), "eos": (2, CONTROL), "unknown": (0, UNKNOWN)}
_TYPES = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
_PHI_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>", "<|endofprompt|>")


def tokens_of(metadata: Metadata) -> list[str]:
    """The text of each token."""
    return metadata.strings(f"{PREFIX}tokens")


def types_of(metadata: Metadata) -> list[int]:
    """The type of each token. Raises TokenizerError for one that does not exist.

    Without types in the file tokens are normal, except the three that SentencePiece begins with.
    One token stands for unknown text. In Phi-3's first files padding has that type too; here it is unused.
    """
    tokens, key = tokens_of(metadata), f"{PREFIX}token_type"
    if key not in metadata.values:
        known = _TYPES if metadata.values.get(f"{PREFIX}model") == "llama" else {}
        return [known.get(token, 1) for token in tokens]
    types = metadata.numbers(key, len(tokens))
    if bad := types[~np.isin(types, range(BYTE + 1))].tolist():
        raise TokenizerError("unknown type of a token", where=metadata.where, expected=f"0 to {BYTE}", found=bad[0])
    unknown = np.flatnonzero(types == UNKNOWN)
    if len(unknown) > 1:
        types = types.copy()
        types[unknown[unknown != metadata.integer(f"{PREFIX}unknown_token_id", int(unknown[0]))]] = UNUSED
    found: list[int] = types.tolist()
    return found


def token_id(metadata: Metadata, name: str) -> int | None:
    """The id of `bos`, `eos`, `unknown`, ...; None where the file has none. Raises ConfigError for one past the end.

    For padding, which changes no answer, such an id counts as absent.
    """
    key, count = f"{PREFIX}{name}_token_id", len(tokens_of(metadata))
    if key in metadata.values:
        index = metadata.integer(key)
        if index < count:
            return index
        if name != "padding":
            raise metadata.error(key, f"an id below {count}, the size of the vocabulary", index)
    if name not in _DEFAULTS or metadata.values.get(f"{PREFIX}model") != "llama":
        return None
    index, kind = _DEFAULTS[name]
    return index if index < count and types_of(metadata)[index] == kind else None


def end_ids(metadata: Metadata) -> list[int]:
    """The ids that end an answer, sorted: those that the file names, and those recognized by their text."""
    tokens = tokens_of(metadata)
    found = named_ends(tokens, types_of(metadata))
    index_of = {text: index for index, text in enumerate(tokens)}
    for name, texts in _END_IDS.items():
        index = token_id(metadata, name)
        if index is None:
            index = next((index_of[text] for text in texts if text in index_of), None)
        if index is not None:
            found.add(index)
    # Harmony (gpt-oss) and Solar write <|end|> after each of an answer's messages.
    spelled = {tokens[index] for index in found}
    if {"<|call|>", "<|calls|>"} & spelled and {"<|return|>", "<|flush|>"} & spelled:
        found.discard(index_of.get("<|end|>", -1))
    return sorted(found)


def named_ends(tokens: Sequence[str], types: Sequence[int]) -> set[int]:
    """The ids of tokens that end an answer by their text, whatever their type.

    Except for </s>, which is text to Gemma: the end of <s>, struck out. It must be a control token.
    """
    wanted = frozenset(_ENDS)
    found = {index for index, text in enumerate(tokens) if text in wanted}
    return {index for index in found if tokens[index] != "</s>" or types[index] == CONTROL}


def added_tokens(metadata: Metadata) -> list[Any]:
    """The tokens at which a text is split first, as `tokenizers.AddedToken`: control and user-defined tokens.

    Those of Phi-3 and Phi-4 mini strip the white space after them, those of Phi-4 on both sides, as the published
    tokenizer_config.json say; llama.cpp knows Phi-3 by its name.
    """
    from tokenizers import AddedToken

    tokens, types = tokens_of(metadata), types_of(metadata)
    ends = named_ends(tokens, types)
    name = str(metadata.values.get("general.name")).lower()
    phi = metadata.values.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name
    both = phi and "<|im_sep|>" in tokens
    added = []
    for index, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if text and (kind in (UNKNOWN, CONTROL, USER_DEFINED) or index in ends):
            special = kind != USER_DEFINED or index in ends
            after = both or (phi and text not in _PHI_UNSTRIPPED)
            added.append(AddedToken(text, normalized=False, special=special, lstrip=both, rstrip=after))
    return added
