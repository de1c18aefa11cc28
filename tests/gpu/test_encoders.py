"""Encoders compiled for a GPU against transformers, and alone against in a batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from tests.gpu.conftest import Gpu
from tests.models import tiny_encoders as tiny


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean"), ("modernbert", "cls")])
def test_embeddings_are_those_of_transformers_and_the_same_bits_in_any_batch(
    gpu: Gpu, tmp_path: Path, family: str, pooling: str
) -> None:
    model, checkpoint = tiny.write(family, tmp_path / "checkpoint", pooling)
    bundle = mlcpipe.compile(checkpoint, target=gpu.plain, quantization="q0f32", output=tmp_path / "bundle")
    texts = tiny.random_ids((1, 17, 64, 65, 160, 3))
    expected = np.stack([tiny.pooled(tiny.hidden_states(model, ids), pooling) for ids in texts])
    embedder = mlcpipe.Embedder(bundle)
    found = embedder.embed(texts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    for i in (1, 3, 4):
        np.testing.assert_array_equal(embedder.embed([texts[i]])[0], found[i])
