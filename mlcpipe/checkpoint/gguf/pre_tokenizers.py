"""Normalizers and splits of byte-level BPE, by GGUF's `tokenizer.ggml.pre`.

Patterns are those of the published tokenizer.json files, which llama.cpp's llama-vocab.cpp quotes or adapts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

PreTokenizer = pre_tokenizers.PreTokenizer

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _CL100K.replace("{1,3}", "")
_QWEN35 = _QWEN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _O200K.replace(_SUFFIX, "").replace("{1,3}", "")
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    r"Ὗ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK,
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Pipeline:
    """How byte-level BPE cuts a text.

    `adds_bos` is what llama.cpp assumes where the file does not say; `ignore_merges` makes a word of the vocabulary one
    token, whatever its merges.
    """

    pre_tokenizer: Callable[[], PreTokenizer]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normal form, or None."""
        return normalizers.NFC() if self.nfc else None


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated", False)


def _digits() -> PreTokenizer:
    return pre_tokenizers.Digits(individual_digits=True)


def _bytes_after(*steps: PreTokenizer, use_regex: bool = False) -> PreTokenizer:
    """`steps`, then bytes as characters; `use_regex` also cuts by GPT-2's pattern."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*steps, last]) if steps else last


def _patterns(*patterns: str) -> Callable[[], PreTokenizer]:
    return lambda: _bytes_after(*map(_split, patterns))


def _falcon() -> PreTokenizer:
    words = [pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    digits = [pre_tokenizers.Digits(individual_digits=False), _split("[0-9][0-9][0-9]")]
    return pre_tokenizers.Sequence([*words, *digits])


def _deepseek_llm() -> PreTokenizer:
    return _bytes_after(*map(_split, _DEEPSEEK_LLM), _digits())


def _deepseek_coder() -> PreTokenizer:
    return _bytes_after(*map(_split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)), _digits())


_GPT2 = Pipeline(lambda: _bytes_after(use_regex=True))
_DIGITS_GPT2 = Pipeline(lambda: _bytes_after(_digits(), use_regex=True))
_LLAMA3 = Pipeline(_patterns(_CL100K), ignore_merges=True, adds_bos=True)

PIPELINES = {
    **dict.fromkeys(("gpt-2", "phi-2", "a.x-4.0", "mellum", "trillion", "exaone4"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Pipeline(_patterns(_CL100K))),
    "qwen2": Pipeline(_patterns(_QWEN), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), Pipeline(_patterns(_QWEN))),
    "seed-coder": Pipeline(_patterns(_QWEN.replace(r"+[\r\n]*", "+"))),
    "qwen35": Pipeline(_patterns(_QWEN35), nfc=True),
    **dict.fromkeys(("mpt", "olmo"), Pipeline(_GPT2.pre_tokenizer, nfc=True)),
    "gpt-4o": Pipeline(_patterns(_O200K)),
    "tekken": Pipeline(_patterns(_TEKKEN), ignore_merges=True, adds_bos=True),
    "falcon": Pipeline(_falcon),
    "deepseek-llm": Pipeline(_deepseek_llm),
    "deepseek-coder": Pipeline(_deepseek_coder),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Pipeline(_patterns(*_DEEPSEEK_V3))),
}
