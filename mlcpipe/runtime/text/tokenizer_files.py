"""Read the files of a tokenizer from a checkpoint or bundle folder: data only, size-limited, no code of the model.

`special_tokens.py` reads the tokens of the files beside the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer_calls import guarded
from mlcpipe.runtime.text.tokenizer_limits import check_source
from mlcpipe.support.files import LFS_ADVICE, LFS_START, read_bounded
from mlcpipe.support.json_files import read_json_object, shown

# A vocabulary of 130 000 tokens with its merges makes 8.5 MB; twice that many with long tokens stay far below.
MAX_TOKENIZER_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 256 << 10

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
VOCABULARIES = (TOKENIZER, "vocab.json", "vocab.txt")  # one of them there must be
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_TEMPLATES = 32  # files of the folder

# All that are read, also the folder of more templates.
FILE_NAMES = (
    *VOCABULARIES,
    "merges.txt",
    "added_tokens.json",
    SETTINGS,
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    TEMPLATE_FOLDER,
)

# Classes whose pre-tokenizers are known here: vocab.json and merges.txt do not hold the rules by which others cut text.
BERT, GPT2, QWEN2 = "BertTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"
_BYTE_LEVEL_CLASSES = (GPT2, "CodeGenTokenizer", QWEN2)
# How Qwen 2 cuts text (transformers, `tokenization_qwen2.py`).
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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


def chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Named Jinja sources; the only or main one is `default`.

    As in transformers chat_template.jinja and the files of additional_chat_templates/, if there are any, replace what
    `settings`, tokenizer_config.json, has. Without both there may be chat_template.json, which only transformers'
    processors read. Raises TokenizerError.
    """
    paths = {"default": folder / "chat_template.jinja"}
    more = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    if len(more) > MAX_TEMPLATES:
        raise TokenizerError("too many files", where=folder / TEMPLATE_FOLDER, expected=MAX_TEMPLATES, found=len(more))
    paths |= {path.name.removesuffix(".jinja"): path for path in more}
    found = {name: read_text(path, MAX_TEMPLATE_BYTES) for name, path in paths.items() if path.exists()}
    stated = settings.get("chat_template")
    if found or stated is not None:
        return found or _stated_templates(stated, folder / SETTINGS)
    path = folder / "chat_template.json"
    return _stated_templates(read_object(path).get("chat_template", {}), path)


def _stated_templates(stated: object, where: Path) -> dict[str, str]:
    """Templates of a JSON file: a text, a list of objects with `name` and `template`, or texts by name."""
    if isinstance(stated, str):
        return {"default": stated}
    pairs: list[tuple[object, object]] = list(stated.items()) if isinstance(stated, dict) else []
    if isinstance(stated, list):
        pairs = [(one.get("name"), one.get("template")) if isinstance(one, dict) else (None, one) for one in stated]
    texts = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if len(texts) < len(set(map(str, (name for name, _ in pairs)))) or not isinstance(stated, list | dict):
        expected = "a text, or objects with a name and a template"
        raise TokenizerError("broken chat_template", where=where, expected=expected, found=shown(stated))
    return texts


def open_library(folder: Path, kind: str) -> tokenizers.Tokenizer:
    """The library's tokenizer from tokenizer.json, else from the vocabulary of a class. Raises TokenizerError.

    `kind` is the name of transformers' class, "" for none. Without tokenizer.json no tokens are put around a text yet.
    """
    path = folder / TOKENIZER
    if path.exists():
        source = read_text(path, MAX_TOKENIZER_BYTES)
        if source.startswith(LFS_START.decode()):
            raise TokenizerError("a pointer of Git LFS, not the tokenizer", where=path, next_step=LFS_ADVICE)
        check_source(source)
        library = guarded(
            "broken tokenizer", path, lambda: tokenizers.Tokenizer.from_str(source), "download tokenizer.json again"
        )
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        library = _byte_level(folder, kind or GPT2)
    elif (folder / "vocab.txt").exists() and kind == BERT:
        library = _bert(folder)
    elif own := sorted(folder.glob("rwkv_vocab*.txt")):
        raise TokenizerError(
            "RWKV's own tokenizer is not supported", where=own[0], expected="tokenizer.json",
            next_step="take a copy of the model that has one",
        )  # fmt: skip
    else:
        pieces = sorted(p.name for p in (*folder.glob("*.model"), *folder.glob("*.tiktoken"), *folder.glob("vocab.*")))
        if pieces:
            raise TokenizerError(
                "no tokenizer.json", where=folder, found=f"only {', '.join(pieces)}", next_step=_CONVERT
            )
        raise TokenizerError(
            "no tokenizer", where=folder, expected="tokenizer.json", next_step="copy it from the model's page"
        )
    # A saved truncation is about training batches; here it would silently cut prompts.
    library.no_truncation()
    return library


def _byte_level(folder: Path, kind: str) -> tokenizers.Tokenizer:
    if kind not in _BYTE_LEVEL_CLASSES:
        raise TokenizerError(
            "no tokenizer.json",
            where=folder,
            expected="GPT2Tokenizer or Qwen2Tokenizer for vocab.json and merges.txt alone",
            found=kind,
            next_step=_CONVERT,
        )
    vocab = read_object(folder / "vocab.json", MAX_TOKENIZER_BYTES)
    lines = _lines(folder / "merges.txt")
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
    library = guarded("broken vocabulary", folder, lambda: tokenizers.Tokenizer(models.BPE(vocab, merges)))
    if kind == QWEN2:
        library.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(tokenizers.Regex(_QWEN2_WORDS), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def _bert(folder: Path) -> tokenizers.Tokenizer:
    vocab = {line.rstrip(): index for index, line in enumerate(_lines(folder / "vocab.txt"))}
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return library


def _lines(path: Path) -> list[str]:
    """The lines of a file with either system's line ends."""
    lines = read_text(path, MAX_TOKENIZER_BYTES).split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
