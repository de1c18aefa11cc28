"""The tokenizer of a GGUF file as the files that a checkpoint folder has: tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` names the algorithm: `gpt2` is byte-level BPE, cut by `tokenizer.ggml.pre`; `llama` is
SentencePiece's BPE, whose merges follow from the scores; `gemma4` is SentencePiece's with merges of its own.
"""

from __future__ import annotations

import json
from typing import Any

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.errors import TokenizerError
from mlcpipe.json_files import shown

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_TEMPLATES = 16
MAX_PIECE_WORK = 200_000_000  # characters squared: every token is cut at each place; those of Gemma have 11 million
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_MAX_TYPE = 6  # also: 1 normal, 5 unused, 6 byte
# Name in tokenizer_config.json -> name in the file.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Ids that end an answer: of a text, of a turn, and of a message.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_MODELS = ("gpt2", "llama", "gemma4")


def end_ids(metadata: Metadata) -> list[int]:
    """The ids that end an answer, sorted."""
    return sorted({index for key in _ENDS if (index := _optional_id(metadata, key)) is not None})


def bos_id(metadata: Metadata) -> int | None:
    """The id that begins a text, if the file names one."""
    return _optional_id(metadata, "bos_token_id")


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json. Raises TokenizerError, and ConfigError for a key of a wrong type."""
    tokens = metadata.strings(f"{_PREFIX}tokens")
    library = _library(metadata, tokens)
    settings = _settings(metadata, tokens)
    return {TOKENIZER: library.to_str(), SETTINGS: json.dumps(settings, ensure_ascii=False)}


def _library(metadata: Metadata, tokens: list[str]) -> Any:
    from tokenizers import AddedToken

    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocab[token] != index)
        raise _refusal(metadata, "a token is listed twice", "each once", shown(repeated))
    kind = metadata.text(f"{_PREFIX}model")
    if kind not in _MODELS:
        raise _refusal(metadata, "the tokenizer is not supported", " or ".join(_MODELS), shown(kind))
    types = _types(metadata, tokens)
    if kind == "gpt2":
        library, adds_bos = _byte_level(metadata, vocab)
    else:
        library, adds_bos = _sentence_piece(metadata, vocab, types), True
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]
    library.add_tokens(added)
    _add_around(library, metadata, tokens, adds_bos)
    return library


def _byte_level(metadata: Metadata, vocab: dict[str, int]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether a text begins with BOS unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, models

    from mlcpipe.checkpoint.gguf.pre_tokenizers import PIPELINES

    pre = metadata.text(f"{_PREFIX}pre", "")
    pipeline = PIPELINES.get(pre)
    if pipeline is None:
        raise _refusal(metadata, f"unknown {_PREFIX}pre", ", ".join(sorted(PIPELINES)), shown(pre))
    library = Tokenizer(models.BPE(vocab, _merges(metadata, vocab), ignore_merges=pipeline.ignore_merges))
    library.normalizer = pipeline.normalizer()
    library.pre_tokenizer = pipeline.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library, pipeline.adds_bos


def _sentence_piece(metadata: Metadata, vocab: dict[str, int], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    listed = f"{_PREFIX}merges" in metadata.values
    merges = _merges(metadata, vocab) if listed else _scored_merges(metadata, vocab)
    unknown = next((token for token, index in vocab.items() if types[index] == _UNKNOWN), None)
    bytes_ = "<0x00>" in vocab
    library = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_))
    space, prefix = normalizers.Replace(" ", "▁"), metadata.flag(f"{_PREFIX}add_space_prefix", True)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    if not prefix:
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return library


def _types(metadata: Metadata, tokens: list[str]) -> list[int]:
    """The type of each token, normal where the file has none."""
    if f"{_PREFIX}token_type" not in metadata.values:
        return [1] * len(tokens)
    types: list[int] = metadata.numbers(f"{_PREFIX}token_type", len(tokens)).tolist()
    bad = next((kind for kind in types if kind not in range(_MAX_TYPE + 1)), None)
    if bad is not None:
        raise _refusal(metadata, "unknown type of a token", f"0 to {_MAX_TYPE}", bad)
    return types


def _merges(metadata: Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The listed merges. Raises TokenizerError for one that names no token."""
    pairs = []
    for merge in metadata.strings(f"{_PREFIX}merges"):
        at = merge.find(" ", 1)  # the first token may begin with a space
        left, right = merge[:at], merge[at + 1 :]
        if at < 1 or left not in vocab or right not in vocab or left + right not in vocab:
            raise _refusal(metadata, "a merge names no token", "two tokens that make a third", shown(merge))
        pairs.append((left, right))
    return pairs


def _scored_merges(metadata: Metadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a third, by its score, as transformers converts SentencePiece's models."""
    scores = metadata.numbers(f"{_PREFIX}scores", len(vocab)).tolist()
    if (work := sum(len(piece) ** 2 for piece in vocab)) > MAX_PIECE_WORK:
        raise _refusal(metadata, "the tokens are too long", f"lengths whose squares sum to {MAX_PIECE_WORK}", work)
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in vocab]
        inside = [pair for pair in pairs if pair[1] in vocab]
        if len(inside) > 1:
            inside.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in inside]
    found.sort(key=lambda one: one[:3], reverse=True)
    return [one[3:] for one in found]


def _add_around(library: Any, metadata: Metadata, tokens: list[str], adds_bos: bool) -> None:
    """Make the tokenizer put BOS before and EOS after a text, where the file asks for them."""
    from tokenizers import processors

    adds_eos = metadata.flag(f"{_PREFIX}add_eos_token", False)
    adds_bos = metadata.flag(f"{_PREFIX}add_bos_token", adds_bos)
    bos = _optional_id(metadata, "bos_token_id") if adds_bos else None
    eos = _optional_id(metadata, "eos_token_id") if adds_eos else None
    pieces = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    if len(pieces) > 1:
        named = {name: index for name, index in (("bos", bos), ("eos", eos)) if index is not None}
        entries = [{"id": name, "ids": [index], "tokens": [tokens[index]]} for name, index in named.items()]
        library.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=entries)


def _settings(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the named special tokens and the chat templates."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL.items():
        index = _optional_id(metadata, f"{key}_token_id")
        settings[name] = None if index is None else tokens[index]
    template = "tokenizer.chat_template"
    names = metadata.strings(f"{template}s")[:MAX_TEMPLATES] if f"{template}s" in metadata.values else []
    others = [{"name": name, "template": metadata.text(f"{template}.{name}")} for name in names if name != "default"]
    if template in metadata.values:
        main = metadata.text(template)
        settings["chat_template"] = [{"name": "default", "template": main}, *others] if others else main
    return settings


def _optional_id(metadata: Metadata, key: str) -> int | None:
    """A token's id within the vocabulary; None where the file has none."""
    full = _PREFIX + key
    if full not in metadata.values:
        return None
    index, count = metadata.integer(full), len(metadata.strings(f"{_PREFIX}tokens"))
    if index >= count:
        raise metadata.error(full, f"an id below {count}, the size of the vocabulary", index)
    return index


def _refusal(metadata: Metadata, what: str, expected: str, found: object) -> TokenizerError:
    return TokenizerError(what, where=metadata.where, expected=expected, found=found)
