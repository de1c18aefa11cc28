"""Read the files of a tokenizer from a checkpoint or bundle folder: data only, size-limited, no code of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mlcpipe.errors import TokenizerError
from mlcpipe.files import read_bounded
from mlcpipe.json_files import read_json_object
from mlcpipe.runtime.text.tokenizer_calls import guarded
from mlcpipe.runtime.text.tokenizer_limits import check_source

# A vocabulary of 130 000 tokens with its merges makes 8.5 MB; twice that many with long tokens stay far below.
MAX_TOKENIZER_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 256 << 10

# Written by transformers' save_pretrained; the order is that of `Tokenizer.files()`.
FILE_NAMES = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# Classes whose pre-tokenizer is GPT-2's; others cut text by rules that vocab.json and merges.txt do not hold.
_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "CodeGenTokenizer", "CodeGenTokenizerFast")

_CONVERT = (
    'convert it once: python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('FOLDER').save_pretrained('FOLDER')\" (needs pip install transformers sentencepiece)"
)


def read_text(path: Path, limit: int) -> str:
    """The UTF-8 text of a regular file of at most `limit` bytes. Raises TokenizerError."""
    try:
        return read_bounded(path, limit, TokenizerError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError("broken file", where=path, expected="UTF-8", found=error.reason) from error


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in `path`, {} where there is no such file. Raises TokenizerError."""
    return read_json_object(path, limit=limit, error=TokenizerError) if path.exists() else {}


def token_text(value: object) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, … of special_tokens_map.json, overridden by tokenizer_config.json."""
    merged = {**read_object(folder / "special_tokens_map.json"), **config}
    texts = {name: token_text(value) for name, value in merged.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Named Jinja sources; the only or main one is `default`. chat_template.jinja wins over tokenizer_config.json."""
    where = folder / "tokenizer_config.json"
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for entry in found:
            fields = entry if isinstance(entry, dict) else {}
            name, source = fields.get("name"), fields.get("template")
            if not isinstance(name, str) or not isinstance(source, str):
                raise TokenizerError("broken chat_template", where=where, expected="objects with a name and a template")
            templates[name] = source
    elif found is not None:
        raise TokenizerError(
            "broken chat_template", where=where, expected="a string or a list", found=type(found).__name__
        )
    path = folder / "chat_template.jinja"
    if path.exists():
        templates["default"] = read_text(path, MAX_TEMPLATE_BYTES)
    return templates


def open_library(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The library's tokenizer from tokenizer.json, else from vocab.json and merges.txt. Raises TokenizerError."""
    path = folder / "tokenizer.json"
    if path.exists():
        source = read_text(path, MAX_TOKENIZER_BYTES)
        check_source(source)
        library = guarded("broken tokenizer", path, lambda: tokenizers.Tokenizer.from_str(source))
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        library = _from_vocab_and_merges(folder, config)
    else:
        pieces = sorted(p.name for p in (*folder.glob("*.model"), *folder.glob("*.tiktoken")))
        if pieces:
            raise TokenizerError(
                "no tokenizer.json", where=folder, found=f"only {', '.join(pieces)}", next_step=_CONVERT
            )
        raise TokenizerError(
            "no tokenizer", where=folder, expected="tokenizer.json", next_step="copy it from the checkpoint"
        )
    # A saved truncation or padding is about training batches; here it would silently cut prompts.
    library.no_truncation()
    library.no_padding()
    _add_missing(library, folder, config)
    return library


def _from_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    name = config.get("tokenizer_class", "GPT2Tokenizer")
    if name not in _GPT2_CLASSES:
        raise TokenizerError(
            "no tokenizer.json",
            where=folder,
            expected="GPT2Tokenizer for vocab.json and merges.txt alone",
            found=name,
            next_step=_CONVERT,
        )
    vocab = read_object(folder / "vocab.json", MAX_TOKENIZER_BYTES)
    lines = read_text(folder / "merges.txt", MAX_TOKENIZER_BYTES).split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    broken = next((pair for pair in pairs if len(pair) != 2), None)
    if broken is not None:
        raise TokenizerError(
            "broken line",
            where=folder / "merges.txt",
            expected="two tokens",
            found=repr(" ".join(broken)[:80]),
        )
    merges = [(pair[0], pair[1]) for pair in pairs]
    model = guarded("broken vocabulary", folder, lambda: models.BPE(vocab, merges))
    library = tokenizers.Tokenizer(model)
    prefix = config.get("add_prefix_space") is True
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    return library


def _add_missing(library: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds tokens that only added_tokens.json or tokenizer_config.json list, at exactly the ids they state."""
    listed: dict[int, dict[str, Any]] = {}
    for text, index in read_object(folder / "added_tokens.json").items():
        if isinstance(index, int):
            listed[index] = {"content": text}
    decoder = config.get("added_tokens_decoder")
    for key, entry in (decoder if isinstance(decoder, dict) else {}).items():
        if str(key).isascii() and str(key).isdigit() and isinstance(entry, dict):
            listed[int(key)] = entry
    specials = set(named_tokens(folder, config).values())
    for index, entry in sorted(listed.items()):
        content = token_text(entry)
        if not content or library.token_to_id(content) is not None:
            continue
        flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "normalized")}
        special = entry.get("special") is True or content in specials
        library.add_tokens([tokenizers.AddedToken(content, special=special, **flags)])
        if library.token_to_id(content) != index:
            raise TokenizerError(
                f"added token {content!r} cannot have its id",
                where=folder,
                expected=index,
                found=library.token_to_id(content),
                next_step=_CONVERT,
            )
