"""Embeddings and scores of every encoder family beside sentence-transformers, from texts to vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcpipe
from tests.conftest import QUICK
from tests.models import tiny_encoders as tiny

pytestmark = pytest.mark.everything
TOLERANCE = 1e-4
TEXTS = [
    "a cat sat on a mat",
    "birds sang songs, of rain",
    "Rain.",
    "the dog ran far away from home " * 10,
    "w1 w2 w99 ?",
]
CASES = [("bert", "mean"), ("modernbert", "cls"), ("nomic_bert", "mean"), ("qwen3", "last")]


@pytest.fixture(scope="module")
def sentence_transformers() -> Any:
    return pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")


def bundle_of(folder: Path, *given: Any, **options: Any) -> tuple[Path, Path]:
    """A tiny checkpoint, and its bundle in float32."""
    _, checkpoint = tiny.write(given[0], folder / "checkpoint", *given[1:], **options)
    options = {"target": QUICK, "quantization": "q0f32", "output": folder / "bundle"}
    return checkpoint, mlcpipe.compile(checkpoint, **options)


@pytest.mark.parametrize(("family", "pooling"), CASES, ids=[family for family, _ in CASES])
def test_embeddings(family: str, pooling: str, sentence_transformers: Any, tmp_path: Path) -> None:
    checkpoint, bundle = bundle_of(tmp_path, family, pooling, normalize=True)
    model = sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")
    expected, found = model.encode(TEXTS), mlcpipe.Embedder(bundle).embed(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_scores(sentence_transformers: Any, tmp_path: Path) -> None:
    checkpoint, bundle = bundle_of(tmp_path, "bert", None, num_labels=1)
    model = sentence_transformers.CrossEncoder(str(checkpoint), device="cpu")
    # As BERT's own tokenizer has it; transformers' class for any tokenizer leaves the second text's type out.
    model.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    expected = model.predict([("who sat?", text) for text in TEXTS])
    found = mlcpipe.Embedder(bundle).rerank("who sat?", TEXTS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
