"""Small tokenizers with the pipelines of published models, trained here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.unit.text.conftest import LINES, SPECIALS

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_POSSESSIVE = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN = CL100K.replace("{1,3}", "")
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NEMO = O200K.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
)
_LETTERS_CUT = r"(?=[\p{L}])([^a-z])+|\p{L}+?(?=\p{Lu})|\d{2}|\A\s|.\z|^-+$"  # syntax that the others lack


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def bytes_after(
    *steps: pre_tokenizers.PreTokenizer, use_regex: bool = False, prefix: bool = False
) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    return pre_tokenizers.Sequence([*steps, last]) if steps else last


def _byte_level(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    *,
    bos: bool = False,
    ignore_merges: bool = False,
) -> Tokenizer:
    library = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=560, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(LINES, trainer)
    library.add_tokens(["ÿ", AddedToken("<a b>", normalized=False, lstrip=True), AddedToken("žluť", single_word=True)])
    library.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|eot_id|>", rstrip=True)])
    if bos:
        template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return library


def _sentence_piece(
    normalizer: normalizers.Normalizer | None,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    *,
    strip: bool = False,
    bytes_: range = range(256),
    fuse_unk: bool = True,
    bos: bool = True,
) -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([*LINES[:2], "    "], trainers.BpeTrainer(vocab_size=260, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in bytes_), *model["vocab"], "▁▁", "▁▁▁▁"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(names))}
    merges = [*map(tuple, model["merges"]), ("▁", "▁"), ("▁▁", "▁▁")]
    library = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=fuse_unk, byte_fallback=bool(bytes_)))
    if normalizer is not None:
        library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    library.add_special_tokens(SPECIALS[1:])
    library.add_tokens([AddedToken("žluť", normalized=True), AddedToken("<a b>", rstrip=True, normalized=False)])
    library.add_special_tokens([AddedToken("<|im_start|>", rstrip=True), AddedToken("<|eot_id|>", lstrip=True)])
    if bos:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


_SPACE = normalizers.Replace(" ", "▁")
_LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), _SPACE])


def falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ]
    )


# The first ten are those of the model families.
PIPELINES: dict[str, Callable[[], Tokenizer]] = {
    "llama2": lambda: _sentence_piece(_LLAMA2, strip=True),
    "llama3": lambda: _byte_level(bytes_after(split(CL100K)), bos=True, ignore_merges=True),
    "mistral": lambda: _sentence_piece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), strip=True),
    "mistral-nemo": lambda: _byte_level(bytes_after(split(_NEMO)), bos=True),
    "qwen2": lambda: _byte_level(bytes_after(split(QWEN)), normalizers.NFC()),
    "gemma": lambda: _sentence_piece(_SPACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "phi3": lambda: _sentence_piece(_LLAMA2, strip=True, bos=False),
    "olmo2": lambda: _byte_level(bytes_after(split(CL100K)), bos=True),
    "qwen3.5": lambda: _byte_level(bytes_after(split(QWEN35)), normalizers.NFC()),
    "o200k": lambda: _byte_level(bytes_after(split(O200K, "removed", True))),
    "gpt2": lambda: _byte_level(bytes_after(use_regex=True)),
    "gpt2-prefix": lambda: _byte_level(bytes_after(use_regex=True, prefix=True)),
    "possessive": lambda: _byte_level(bytes_after(split(_POSSESSIVE))),
    "starcoder": lambda: _byte_level(bytes_after(pre_tokenizers.Digits(individual_digits=True), use_regex=True)),
    "deepseek3": lambda: _byte_level(bytes_after(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(_DEEPSEEK3))),
    "deepseek-llm": lambda: _byte_level(
        bytes_after(*map(split, DEEPSEEK_LLM), pre_tokenizers.Digits(individual_digits=True)), normalizers.Sequence([])
    ),
    "falcon": lambda: _byte_level(falcon()),
    "syntax": lambda: _byte_level(bytes_after(split(_LETTERS_CUT, "contiguous"), split(" +", "merged_with_next"))),
    "nfkc": lambda: _byte_level(bytes_after(split(r"\s+", "merged_with_previous")), normalizers.NFKC()),
    "nfd": lambda: _byte_level(bytes_after(split(r"\w+", "removed", True)), normalizers.NFD()),
    "no-bytes": lambda: _sentence_piece(_SPACE, bytes_=range(0), fuse_unk=False),
    "some-bytes": lambda: _sentence_piece(_SPACE, pre_tokenizers.Metaspace("▁", "always"), bytes_=range(0x80, 0xE0)),
    "regex-replace": lambda: _sentence_piece(
        normalizers.Sequence([normalizers.NFKD(), normalizers.Replace(Regex(r"\s{2,}|[‘’]"), " "), _SPACE])
    ),
}


def save(library: Tokenizer, folder: Path, settings: Mapping[str, Any] | None = None) -> Path:
    """A folder that `Tokenizer.load` reads."""
    library.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
