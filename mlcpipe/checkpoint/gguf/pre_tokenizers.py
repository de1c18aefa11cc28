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
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_JAIS2 = _CL100K.removesuffix(r"\s+(?!\S)|\s+") + "|".join(
    [*(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)|\s"]
)
_NO_SENTENCE_MARKS = " ?[^(\\s|.,!?…。，、।۔،)]+"  # BLOOM's
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
_AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[一-鿿㐀-䶿豈-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-\u0e7f຀-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+",
    _DEEPSEEK_V3[2],
)
_SPARK = (*_DEEPSEEK_V3[:2], _DEEPSEEK_V3[2].replace(r"+[\r\n]*|\s*[\r\n]+", r"+|[\r\n]"), r"\p{N}")
_YOUTU = ("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", _O200K.replace("{1,3}", ""))


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
    **dict.fromkeys(
        ("gpt-2", "phi-2", "a.x-4.0", "mellum", "trillion", "exaone4", "jais", "gigachat", "granite-docling"), _GPT2
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "minerva-7b", "codeshell", "exaone", "mellum2"), _DIGITS_GPT2
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral", "lfm2", "falcon-h1"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Pipeline(_patterns(_CL100K))),
    **dict.fromkeys(("glm4", "glm5"), Pipeline(_patterns(_CL100K), ignore_merges=True)),
    "jais-2": Pipeline(_patterns(_JAIS2)),
    "minicpm5": Pipeline(_patterns(r"\p{N}{1,3}", _CL100K.replace("{1,3}", "+")), ignore_merges=True),
    **dict.fromkeys(("qwen2", "hunyuan"), Pipeline(_patterns(_QWEN), nfc=True)),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "solar-open", "grok-2"), Pipeline(_patterns(_QWEN))
    ),
    "ufakzeka": Pipeline(_patterns(_QWEN.removeprefix(_CONTRACTIONS))),
    "laguna": Pipeline(_patterns(r"[^\n]+|\n+", _QWEN)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Pipeline(_patterns(_BAILING))),
    "seed-coder": Pipeline(_patterns(_QWEN.replace(r"+[\r\n]*", "+"))),
    "exaone-moe": Pipeline(_patterns(_EXAONE_MOE)),
    "qwen35": Pipeline(_patterns(_QWEN35), nfc=True),
    **dict.fromkeys(("mpt", "olmo"), Pipeline(_GPT2.pre_tokenizer, nfc=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), Pipeline(_patterns(_O200K))),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Pipeline(_patterns(r"\d{1,3}(?=(?:\d{3})*(?!\w))", _O200K))),
    "superbpe": Pipeline(_patterns(r"\p{N}+", r"\p{N}+?(?=(?:\d{3})+(?!\d))")),
    "tekken": Pipeline(_patterns(_TEKKEN), ignore_merges=True, adds_bos=True),
    "youtu": Pipeline(_patterns(*_YOUTU), ignore_merges=True),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Pipeline(_patterns(_NO_SENTENCE_MARKS))),
    "viking": Pipeline(lambda: _bytes_after(_split(_NO_SENTENCE_MARKS), _digits())),
    "falcon": Pipeline(_falcon),
    "deepseek-llm": Pipeline(_deepseek_llm),
    "deepseek-coder": Pipeline(_deepseek_coder),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), Pipeline(_patterns(*_DEEPSEEK_V3))),
    "afmoe": Pipeline(_patterns(*_AFMOE)),
    "spark2_5": Pipeline(_patterns(*_SPARK)),
}
