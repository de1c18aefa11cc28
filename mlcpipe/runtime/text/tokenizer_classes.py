"""Additions of transformers' tokenizer classes to the files: named tokens, options, and tokens around a text.

The class is chosen as transformers 5.23 does (`tokenization_auto.py`). The steps of a tokenizer.json stay, though: some
classes replace them (`GPT2Tokenizer` drops the `Digits` of SmolLM), which no model was trained with.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers, processors

from mlcpipe.errors import CheckpointWarning
from mlcpipe.runtime.text.special_tokens import SpecialTokens, read_special_tokens
from mlcpipe.runtime.text.tokenizer_files import BERT, GPT2, QWEN2, SETTINGS, TOKENIZER, open_library

GEMMA, LLAMA = "GemmaTokenizer", "LlamaTokenizer"
_COPIES = {"DreamTokenizer": QWEN2}  # in the code of checkpoints
# Model types with a class; with "" they have none, whatever the files say.
_REGISTERED = {
    **dict.fromkeys(("bert", "nomic_bert"), BERT),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), GEMMA),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), QWEN2),
    **dict.fromkeys(("mistral", "mixtral", "modernbert", "olmo2", "phi3"), ""),
}
_END = "<|endoftext|>"
# A class's named tokens, for files without these names.
_NAMED = {
    BERT: {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
           "mask_token": "[MASK]"},
    GEMMA: {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
            "mask_token": "<mask>"},
    GPT2: {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    QWEN2: {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}  # fmt: skip
# Options of BertTokenizer in tokenizer_config.json -> those of its normalizer.
_BERT_OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def read_library(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, SpecialTokens]:
    """The library's tokenizer with all its tokens, and the files' special tokens.

    `settings` is tokenizer_config.json, `config` the model's config.json. Raises TokenizerError.
    """
    kind = _class_of(settings, config)
    library = open_library(folder, kind)
    if kind == LLAMA and isinstance(library.decoder, decoders.ByteLevel):  # a wrong name, as of DeepSeek's
        kind = ""
    _set_options(library, settings, kind)
    if settings.get("split_special_tokens") is True:
        warnings.warn(CheckpointWarning(f"{SETTINGS}: split_special_tokens; not honoured"), stacklevel=2)
    # A saved padding is about batches, too: only its token counts.
    padding = {"pad_token": library.padding["pad_token"]} if library.padding else {}
    library.no_padding()
    special = read_special_tokens(folder, settings, padding | _NAMED.get(kind, {}), library)
    library = special.add_to(library, plain=kind == QWEN2, rebuilt=kind in _NAMED)
    if not (folder / TOKENIZER).exists():
        if kind == BERT:
            library.model.unk_token = special.texts().get("unk_token", "[UNK]")
        _put_around(library, settings, kind, special.texts())
    return library, special


def _class_of(settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The name of the class without "Fast"; "" for none."""
    model = str(config.get("model_type"))
    registered = _REGISTERED.get(model)
    stated = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if registered == "" or model == "qwen2" or not isinstance(stated, str):  # Qwen 2's files often have a wrong one
        return registered or ""
    stated = stated.removesuffix("Fast")
    return _COPIES.get(stated, stated)


def _set_options(library: tokenizers.Tokenizer, settings: Mapping[str, Any], kind: str) -> None:
    if kind == BERT and type(library.normalizer).__name__ == "BertNormalizer":
        for name, option in _BERT_OPTIONS.items():
            if isinstance(settings.get(name), bool):
                setattr(library.normalizer, option, settings[name])
    if kind in (GPT2, QWEN2) and isinstance(settings.get("add_prefix_space"), bool):
        for step in _steps(library.pre_tokenizer):
            if isinstance(step, pre_tokenizers.ByteLevel):
                step.add_prefix_space = settings["add_prefix_space"]


def _steps(step: Any) -> Iterator[Any]:
    if not isinstance(step, pre_tokenizers.Sequence):
        yield step
        return
    inner: Any = step  # mypy knows no iterator of it
    for part in inner:
        yield from _steps(part)


def _put_around(
    library: tokenizers.Tokenizer, settings: Mapping[str, Any], kind: str, named: Mapping[str, str]
) -> None:
    """BERT's tokens, else BOS and EOS where the settings ask for them; a tokenizer.json states its own."""
    sides = {"begin": "cls" if kind == BERT else "bos", "end": "sep" if kind == BERT else "eos"}
    entries = {
        side: {"id": side, "ids": [library.token_to_id(text)], "tokens": [text]}
        for side, name in sides.items()
        if (text := named.get(f"{name}_token")) and (kind == BERT or settings.get(f"add_{name}_token") is True)
    }
    begin, end = ([side] if side in entries else [] for side in sides)
    if entries:
        second = ["$B:1", *(f"{side}:1" for side in end)]
        pair = [*begin, "$A", *end, *(f"{side}:1" for side in begin if kind != BERT), *second]
        library.post_processor = processors.TemplateProcessing([*begin, "$A", *end], pair, [*entries.values()])
