"""Small tokenizers of each family, trained here on a few multilingual lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog. <|end|> User: hello\n\nAssistant: 123 + 456 = 579",
    "Příliš žluťoučký kůň úpěl ďábelské ódy – „ano“, řekl.",
    "日本語のテキストと中文文本。한국어 텍스트도 있습니다.",
    "Zażółć gęślą jaźń; Съешь же ещё этих мягких булок; ξεσκεπάζω την ψυχοφθόρα",
    "family 👨‍👩‍👧‍👦 flag 🇨🇿 thumbs 👍🏽 party 🎉 e\u0301 a\u0308\u0304 नमस्ते สวัสดี မြန်မာ",
    "def f(x):\n\treturn  [x for _ in range(3)]  # tabs   and   spaces\r\n",
]
# Not in the vocabularies that are trained without byte tokens, spelled in bytes by the others.
UNSEEN = "ꙮ𓀀🦖ᚠቋ 龘 ok ߷"
SPECIALS = ["<unk>", "<s>", "</s>", "<|end|>"]


def _byte_level() -> Tokenizer:
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet)
    library.train_from_iterator(LINES, trainer)
    # "ÿ" is one character of GPT-2's table (the byte 0xFF), "<a b>" has a character that is none of it.
    library.add_tokens(["ÿ", "<a b>", "žluť"])
    return library


def _metaspace(scheme: str) -> Tokenizer:
    library = Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>")
    library.train_from_iterator(LINES, trainer)
    library.add_tokens(["▁▁▁"])
    return library


def _byte_fallback(*, strip: bool) -> Tokenizer:
    """Llama-2's form with `strip`, Gemma's without."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator([LINES[0], LINES[1], "   "], trainers.BpeTrainer(vocab_size=200))
    model = json.loads(trained.to_str())["model"]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(pair) for pair in model["merges"]]
    library = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    library.add_special_tokens(SPECIALS)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return library


def _word_level() -> Tokenizer:
    """Without a decoder: the library joins tokens with spaces."""
    library = Tokenizer(models.WordLevel(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=SPECIALS))
    return library


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": _byte_level,
    "metaspace-always": lambda: _metaspace("always"),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-never": lambda: _metaspace("never"),
    "byte-fallback-llama": lambda: _byte_fallback(strip=True),
    "byte-fallback-gemma": lambda: _byte_fallback(strip=False),
    "word-level": _word_level,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a tokenizer.json for each family."""
    made = {}
    for name, build in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        build().save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        made[name] = folder
    return made


@pytest.fixture(scope="session")
def libraries() -> dict[str, Tokenizer]:
    """The library's tokenizer of each family."""
    return {name: build() for name, build in FAMILIES.items()}


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return [*LINES, UNSEEN]
