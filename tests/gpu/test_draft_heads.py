"""Draft heads on a GPU: no answer changes by them, and what a GPU drafts is what the CPU drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")

from tests.gpu.conftest import Gpu
from tests.models import tiny
from tests.models.drafted import CASE, VOCAB, always_draft, assert_same_answers, compiled
from tests.models.head_files import EAGLE, random_eagle, random_heads, write_eagle, write_heads

SOME = {**EAGLE, "draft_vocab_size": 64}


@pytest.mark.parametrize("target", ["plain", pytest.param("half", marks=pytest.mark.everything)])
@pytest.mark.parametrize("kind", ["eagle", pytest.param("medusa", marks=pytest.mark.everything)])
def test_answers_are_the_same(
    kind: str, target: str, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_draft(monkeypatch)
    if kind == "eagle":
        head = write_eagle(tmp_path / "head", random_eagle(VOCAB, SOME), SOME)
    else:
        head = write_heads(tmp_path / "head", random_heads(VOCAB))
    checkpoint = tiny.write_tiny(CASE, tmp_path / "checkpoint")
    options = {"quantization": "q4f16_1", "kv_cache_dtype": "auto"}
    assert_same_answers(compiled(checkpoint, head, tmp_path / "bundle", getattr(gpu, target), **options), 3)
