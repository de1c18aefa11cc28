"""The tokenizer of a GGUF file as the files that a checkpoint folder has: tokenizer.json and tokenizer_config.json.

`tokenizer.ggml.model` names the algorithm: `gpt2` is byte-level BPE, cut by `tokenizer.ggml.pre`; `llama` is
SentencePiece's BPE, whose merges follow from the scores; `gemma4` is SentencePiece's with merges of its own.
"""

from __future__ import annotations

import json
from typing import Any

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.special_tokens import (
    BYTE,
    CONTROL,
    PREFIX,
    UNKNOWN,
    UNUSED,
    added_tokens,
    token_id,
    tokens_of,
    types_of,
)
from mlcpipe.errors import TokenizerError
from mlcpipe.support.json_files import shown

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_TEMPLATES = 16
_TEMPLATE = "tokenizer.chat_template"  # the main one; others have a name after a dot
MAX_PIECE_WORK = 200_000_000  # characters squared, as every token is split at each place; Gemma's have 11 million
# Name in tokenizer_config.json -> name in the file.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_MODELS = ("gpt2", "llama", "gemma4")
Vocab = dict[str, int]
Merges = list[tuple[str, str]]


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """tokenizer.json and tokenizer_config.json. Raises TokenizerError, and ConfigError for a key of a wrong type."""
    tokens = tokens_of(metadata)
    library = _library(metadata, tokens)
    settings = _settings(metadata, tokens)
    return {TOKENIZER: library.to_str(), SETTINGS: json.dumps(settings, ensure_ascii=False)}


def _library(metadata: Metadata, tokens: list[str]) -> Any:
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if token and vocab.setdefault(token, index) != index:  # several may be empty: they are no text
            raise _refusal(metadata, "a token is listed twice", "each once", shown(token))
    kind = metadata.text(f"{PREFIX}model")
    if kind not in _MODELS:
        raise _refusal(metadata, "the tokenizer is not supported", " or ".join(_MODELS), shown(kind))
    types = types_of(metadata)
    listed = kind != "llama" or f"{PREFIX}merges" in metadata.values
    merges = _merges(metadata, vocab) if listed else _scored_merges(metadata, vocab, types)
    for token in _padding(vocab, types, merges):
        del vocab[token]
    make = _byte_level if kind == "gpt2" else _sentence_piece
    library, adds_bos = make(metadata, vocab, merges, types)
    library.add_tokens(added_tokens(metadata))
    _add_around(library, metadata, tokens, adds_bos)
    return library


def _padding(vocab: Vocab, types: list[int], merges: Merges) -> set[str]:
    """The unused tokens that no merge needs: rows of the embedding without a text, such as `[PAD151669]`."""
    unused = {token for token, index in vocab.items() if types[index] == UNUSED}
    return unused and unused.difference(piece for left, right in merges for piece in (left, right, left + right))


def _byte_level(metadata: Metadata, vocab: Vocab, merges: Merges, types: list[int]) -> tuple[Any, bool]:
    """Byte-level BPE, and whether a text begins with BOS unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, models

    from mlcpipe.checkpoint.gguf.pre_tokenizers import PIPELINES

    pre = metadata.text(f"{PREFIX}pre", "")
    pipeline = PIPELINES.get(pre)
    if pipeline is None:
        raise _refusal(metadata, f"unknown {PREFIX}pre", ", ".join(sorted(PIPELINES)), shown(pre))
    library = Tokenizer(models.BPE(vocab, merges, ignore_merges=pipeline.ignore_merges))
    library.normalizer = pipeline.normalizer()
    library.pre_tokenizer = pipeline.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library, pipeline.adds_bos


def _sentence_piece(metadata: Metadata, vocab: Vocab, merges: Merges, types: list[int]) -> tuple[Any, bool]:
    """SentencePiece's BPE, whose texts begin with BOS unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    named = token_id(metadata, "unknown")
    unknown = next((text for text, index in vocab.items() if index == named or types[index] == UNKNOWN), None)
    bytes_ = "<0x00>" in vocab
    library = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_))
    prefix = metadata.flag(f"{PREFIX}add_space_prefix", metadata.text(f"{PREFIX}model") == "llama")
    space = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    if not prefix:
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return library, True


def _merges(metadata: Metadata, vocab: Vocab) -> Merges:
    """The listed merges. Raises TokenizerError for one that names no token."""
    pairs = []
    for merge in metadata.strings(f"{PREFIX}merges"):
        at = merge.find(" ", 1)  # the first token may begin with a space
        left, right = merge[:at], merge[at + 1 :]
        if at < 1 or left not in vocab or right not in vocab or left + right not in vocab:
            raise _refusal(metadata, "a merge names no token", "two tokens that make a third", shown(merge))
        pairs.append((left, right))
    return pairs


def _scored_merges(metadata: Metadata, vocab: Vocab, types: list[int]) -> Merges:
    """Every pair of tokens that makes a third, by its score, as transformers converts SentencePiece's models.

    Control, byte, unused and unknown tokens are never built from the characters of their names.
    """
    scores = metadata.numbers(f"{PREFIX}scores", len(types)).tolist()
    pieces = {piece for piece, index in vocab.items() if types[index] not in (UNKNOWN, CONTROL, UNUSED, BYTE)}
    if (work := sum(len(piece) ** 2 for piece in pieces)) > MAX_PIECE_WORK:
        raise _refusal(metadata, "the tokens are too long", f"lengths whose squares sum to {MAX_PIECE_WORK}", work)
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if piece not in pieces:
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in pieces]
        inside = [pair for pair in pairs if pair[1] in pieces]
        if len(inside) > 1:
            inside.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in inside]
    found.sort(key=lambda one: one[:3], reverse=True)
    return [one[3:] for one in found]


def _add_around(library: Any, metadata: Metadata, tokens: list[str], adds_bos: bool) -> None:
    """Make the tokenizer add BOS before and EOS after a text if the file asks for it."""
    from tokenizers import processors

    adds_eos = metadata.flag(f"{PREFIX}add_eos_token", False)
    adds_bos = metadata.flag(f"{PREFIX}add_bos_token", adds_bos)
    bos = token_id(metadata, "bos") if adds_bos else None
    eos = token_id(metadata, "eos") if adds_eos else None
    pieces = [*(["bos"] if bos is not None else []), "$A", *(["eos"] if eos is not None else [])]
    if len(pieces) > 1:
        named = {name: index for name, index in (("bos", bos), ("eos", eos)) if index is not None}
        entries = [{"id": name, "ids": [index], "tokens": [tokens[index]]} for name, index in named.items()]
        library.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=entries)


def _settings(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """tokenizer_config.json: the named special tokens and the chat templates."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in _SPECIAL.items():
        index = token_id(metadata, key)
        settings[name] = None if index is None else tokens[index]
    if templates := _templates(metadata):
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return settings


def _templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates by name, from the file's keys. In a file with only a template for tools, that is the main one."""
    names = {key.removeprefix(f"{_TEMPLATE}."): key for key in metadata.values if key.startswith(f"{_TEMPLATE}.")}
    if len(names) > MAX_TEMPLATES:
        raise metadata.error(f"{_TEMPLATE}.*", f"at most {MAX_TEMPLATES} templates", len(names))
    if metadata.values.get(_TEMPLATE):
        names["default"] = _TEMPLATE
    templates = {name: metadata.text(key) for name, key in names.items()}
    if "default" not in templates and "tool_use" in templates:
        templates["default"] = templates["tool_use"]
    return templates


def _refusal(metadata: Metadata, what: str, expected: str, found: object) -> TokenizerError:
    return TokenizerError(what, where=metadata.where, expected=expected, found=found)
