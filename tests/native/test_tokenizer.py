"""The native tokenizer gives the ids of `tokenizers`, or refuses by name when it is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.cxx import Build
from tests.native.pipelines import PIPELINES, save
from tests.native.texts import texts
from tests.native.tokenizers import NativeTokenizer, disagreements, of_pipeline

QUICK, MANY = 1500, 20_000


def load(folder: Path, **config: Any) -> Tokenizer:
    return Tokenizer.load(folder, generation_config={}, config=config)


def changed(tmp_path: Path, **steps: Any) -> Tokenizer:
    """The pipeline "gpt2" with other steps."""
    library = PIPELINES["gpt2"]()
    for name, step in steps.items():
        setattr(library, name, step)
    return load(save(library, tmp_path))


@pytest.mark.fast_cases("llama2", "llama3", "mistral", "qwen2", "gemma", "falcon", "syntax")
@pytest.mark.parametrize("name", PIPELINES)
def test_ids_are_those_of_tokenizers(native_library: Build, tmp_path: Path, name: str) -> None:
    native, tokenizer = of_pipeline(native_library, name, tmp_path)
    assert disagreements(native, tokenizer, texts(QUICK)) == []


@pytest.mark.everything
@pytest.mark.parametrize("name", PIPELINES)
def test_ids_of_many_texts(native_library: Build, tmp_path: Path, name: str) -> None:
    native, tokenizer = of_pipeline(native_library, name, tmp_path)
    assert disagreements(native, tokenizer, texts(MANY, seed=7)) == []


def test_what_is_put_around_a_text(native_library: Build, tmp_path: Path) -> None:
    native, tokenizer = of_pipeline(native_library, "llama2", tmp_path)
    for text in ("", "fox", "<s>fox"):
        assert native.encode(text, True) == tokenizer.encode(text, True)
    assert native.encode("fox", True)[0] == 1 != native.encode("fox")[0]


def test_tokens_that_tokenizer_json_has_not(native_library: Build, tmp_path: Path) -> None:
    """Nor their flags: they are in the files beside it."""
    settings = {"added_tokens_decoder": {"1": {"content": "<s>", "lstrip": True, "special": True}}}
    settings |= {"additional_special_tokens": ["fox"], "eot_token": "<|new|>"}
    said = load(save(PIPELINES["gpt2"](), tmp_path, settings))
    native = NativeTokenizer.of(native_library, said)
    for text in ("a  <s> b", "a fox ", "<|new|> foxes"):
        ids = native.encode(text)
        assert ids == said.encode(text) and native.decode(ids) == said.decode(ids)
    assert len(said.encode("fox")) == len(said.encode(" <s>")) == 1


def test_texts_that_are_refused(native_library: Build, tmp_path: Path) -> None:
    tokenizer = load(save(PIPELINES["gpt2"](), tmp_path))
    top = tokenizer.encode("<|eot_id|>")[0]
    tokenizer.rows, tokenizer.most_chars = top, 10
    native = NativeTokenizer.of(native_library, tokenizer)
    assert native.encode("ž" * 10) == tokenizer.encode("ž" * 10)
    for text, line in {
        "x" * 11: "too long; expected at most 10 characters; found 11",
        "<|eot_id|>": f"no row in the model's embedding in .*; expected ids below {top}; found {top}",
    }.items():
        with pytest.raises(TokenizerError, match=line):
            native.encode(text)
    for broken in (b"a\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80", b"\xe0\x80\xaf"):
        with pytest.raises(TokenizerError, match="expected UTF-8"):
            native.encode(broken)


def test_a_pattern_that_takes_too_long_ends(native_library: Build, tmp_path: Path) -> None:
    slow = pre_tokenizers.Split(Regex(r"\p{L}*\p{L}*\p{L}*\p{L}*[0-9]|."), "isolated")
    native = NativeTokenizer.of(native_library, changed(tmp_path, pre_tokenizer=pre_tokenizers.Sequence([slow])))
    with pytest.raises(TokenizerError, match="takes too long to cut into words"):
        native.encode("a" * 3000)


@pytest.mark.parametrize(
    ("step", "value", "found"),
    [
        ("normalizer", normalizers.Lowercase(), "Lowercase"),
        ("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), "Strip"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "Whitespace"),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r"x|(?i:ss)"), "isolated"), "'letters that are one letter"),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r"x(?<=a)b"), "isolated"), "'\\(\\?<=a\\)b'"),
        ("pre_tokenizer", pre_tokenizers.Split(Regex(r"a*"), "isolated"), "'a\\*'"),
        ("post_processor", processors.BertProcessing(("<s>", 1), ("</s>", 2)), "BertProcessing"),
        ("model", models.WordLevel({"<unk>": 0, "<s>": 1}, unk_token="<unk>"), "WordLevel"),
    ],
    ids=["lowercase", "strip", "whitespace", "fold", "look-behind", "empty", "bert", "word-level"],
)
def test_steps_that_are_not_covered_are_refused_by_name(tmp_path: Path, step: str, value: Any, found: str) -> None:
    tokenizer = changed(tmp_path, **{step: value})
    with pytest.raises(TokenizerError, match=rf"in tokenizer\.json; found {found}"):
        tokenizer_program(tokenizer)
