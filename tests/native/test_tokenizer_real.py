"""The native tokenizer gives the ids of `tokenizers` for the vocabularies of published models."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.cxx import Build
from tests.native.pipelines import save
from tests.native.real_vocabularies import NAMES, vocabulary
from tests.native.texts import texts
from tests.native.tokenizers import NativeTokenizer, disagreements

pytestmark = pytest.mark.full

USUAL = ("gemma-4", "llama-bpe", "llama-spm", "qwen2")  # the others, and 20,000 texts: everything
CASES = [pytest.param(name, 500, id=name) for name in USUAL]
CASES += [pytest.param("deepseek-llm", 500, id="deepseek-llm", marks=pytest.mark.everything)]
CASES += [pytest.param(name, 20_000, id=f"{name}-many", marks=pytest.mark.everything) for name in NAMES]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_ids_are_those_of_tokenizers(native_library: Build, tmp_path: Path, name: str, count: int) -> None:
    library, examples = vocabulary(name, tmp_path)
    settings = {"bos_token": None, "eos_token": None}
    tokenizer = Tokenizer.load(save(library, tmp_path, settings), generation_config={}, config={})
    native = NativeTokenizer.of(native_library, tokenizer)
    some = [text for text, _ in examples]
    assert disagreements(native, tokenizer, [*some, *texts(count, some, seed=11)]) == []
    ids = tokenizer.encode(" ".join(texts(500, some)))
    assert native.decode(ids) == tokenizer.decode(ids)
    if name != "qwen35":  # of which llama.cpp leaves out the normal form NFC
        assert [(text, native.encode(text)) for text, _ in examples] == examples
