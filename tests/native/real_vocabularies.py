"""The vocabularies that llama.cpp keeps for its tests, with the pipelines that their models publish."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tests.native.pipelines import CL100K, DEEPSEEK_LLM, QWEN, QWEN35, bytes_after, falcon, split
from tests.unit.text.real_templates import package

NAMES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "gpt-neox"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
_CONTROL, _USER_DEFINED = 3, 4
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
_PRE_TOKENIZERS = {
    "llama-bpe": lambda: bytes_after(split(CL100K)),
    "qwen2": lambda: bytes_after(split(QWEN)),
    "qwen35": lambda: bytes_after(split(QWEN35)),
    "deepseek-llm": lambda: bytes_after(*map(split, DEEPSEEK_LLM), _DIGITS),
    "deepseek-coder": lambda: bytes_after(*map(split, _DEEPSEEK_CODER), _DIGITS),
    "falcon": falcon,
    "starcoder": lambda: bytes_after(_DIGITS, use_regex=True),
    "refact": lambda: bytes_after(_DIGITS, use_regex=True),
    "command-r": lambda: bytes_after(_DIGITS, use_regex=True),
}


def vocabulary(name: str, folder: Path) -> tuple[Tokenizer, list[tuple[str, list[int]]]]:
    """The library's tokenizer, and texts with the ids that llama.cpp gives where the package has them."""
    with tarfile.open(package()) as archive:
        for member in archive:
            if re.search(rf"/models/ggml-vocab-{re.escape(name)}\.gguf(\.inp|\.out)?$", member.name):
                member.name = Path(member.name).name
                archive.extract(member, folder, filter="data")
    file = folder / f"ggml-vocab-{name}.gguf"
    fields = {key.removeprefix("tokenizer.ggml."): field for key, field in GGUFReader(file).fields.items()}
    facts = {key: fields[key].contents() for key in ("tokens", "merges", "scores", "token_type") if key in fields}
    kind = fields["model"].contents()
    library = _byte_level(name, facts) if kind == "gpt2" else _sentence_piece(facts, is_gemma=kind == "gemma4")
    for index, type_ in enumerate(facts.get("token_type", [])):
        if type_ in (_CONTROL, _USER_DEFINED):
            token = AddedToken(facts["tokens"][index], normalized=False, special=type_ == _CONTROL)
            library.add_tokens([token])
    if not file.with_suffix(".gguf.inp").exists():
        return library, []
    texts = file.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = file.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    return library, [(text, [*map(int, line.split())]) for text, line in zip(texts, ids, strict=False)]


def _byte_level(name: str, facts: dict[str, Any]) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(facts["tokens"])}
    merges = _known(facts["merges"], vocab)
    library = Tokenizer(models.BPE(vocab, merges, ignore_merges=name == "llama-bpe"))
    if name in ("qwen2", "qwen35", "gpt-neox", "mpt"):
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = _PRE_TOKENIZERS.get(name, lambda: bytes_after(use_regex=True))()
    library.decoder = decoders.ByteLevel()
    return library


def _sentence_piece(facts: dict[str, Any], *, is_gemma: bool) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(facts["tokens"])}
    merges = _known(facts["merges"], vocab) if is_gemma else _merges(vocab, facts["scores"])
    library = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    library.normalizer = space if is_gemma else normalizers.Sequence([normalizers.Prepend("▁"), space])
    if is_gemma:
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    strip = [] if is_gemma else [decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return library


def _known(merges: list[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (pair.partition(" ") for pair in merges)]
    return [(left, right) for left, right in pairs if {left, right, left + right} <= vocab.keys()]


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """In the order of the scores, as `transformers` makes them of a SentencePiece model."""
    found: list[tuple[float, str, str]] = []
    for piece, index in vocab.items():
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        inside = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
        found += [(scores[index], *pair) for pair in sorted(inside, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    found.sort(key=lambda one: (one[0], len(one[1]), len(one[2])), reverse=True)
    return [(left, right) for _, left, right in found]
