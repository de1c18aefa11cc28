"""Medusa heads: both forms of their files, and what belongs to another model is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.draft_heads import with_draft_head
from mlcpipe.errors import CheckpointError
from tests.conftest import TinyLlama, write_llama
from tests.models.head_files import HEADS, Tensors, random_heads, write_heads

VOCAB = TinyLlama().vocab_size
GOOD = random_heads(VOCAB)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "model"))


@pytest.mark.parametrize("blocks", [1, 2])
def test_both_forms_are_read(blocks: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    tensors = random_heads(VOCAB, blocks=blocks)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))  # as published beside five heads
    save_file({f"medusa_head.{name}": array for name, array in tensors.items()}, other / "model.safetensors")
    for folder in (write_heads(tmp_path / "head", tensors), other):
        headed = with_draft_head(checkpoint, folder)
        assert headed.draft_head is not None
        assert (headed.draft_head.heads, headed.draft_head.blocks) == (HEADS, blocks)
        for name, array in tensors.items():
            np.testing.assert_array_equal(headed.read(f"medusa_head.{name}"), array)
        assert headed.content_hash() != checkpoint.content_hash()


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (random_heads(VOCAB, 32), r"0\.0\.linear\.weight' of.*another model.*\[64, 64\].*\[32, 32\]"),
        (random_heads(32), r"0\.1\.weight' of.*another model.*\[304, 64\].*\[32, 64\]"),
        (GOOD | {"2.0.linear.bias": np.zeros((1, 64), np.float32)}, r"2\.0\.linear\.bias' of.*\[64\].*\[1, 64\]"),
        (GOOD | {"1.1.weight": np.zeros((VOCAB, 64), np.int32)}, r"1\.1\.weight' of.*found .* of int32"),
        (GOOD | {"7.1.weight": np.zeros((VOCAB, 64), np.float32)}, r"7\.1\.weight' .*would not be used"),
        (GOOD | {"4.0.linear.bias": np.zeros(64, np.float32)}, r"3\.0\.linear\.weight' .*missing"),
        (GOOD | {"9.0.linear.weight": np.zeros((64, 64), np.float32)}, "too many Medusa heads.*up to 8"),
        ({"other.weight": np.zeros((64, 192), np.float32)}, r"no draft head.*other\.weight"),
    ],
    ids=["width", "vocabulary", "rank", "dtype", "unused", "missing", "many", "other"],
)
def test_heads_that_do_not_fit_are_refused(heads: Tensors, said: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as raised:
        with_draft_head(checkpoint, write_heads(tmp_path / "head", heads))
    assert "\n" not in str(raised.value)


def test_numbers_are_checked_when_they_are_read(checkpoint: Checkpoint, tmp_path: Path) -> None:
    heads = GOOD | {"0.1.weight": np.full((VOCAB, 64), np.nan, np.float32)}
    headed = with_draft_head(checkpoint, write_heads(tmp_path / "head", heads))
    with pytest.raises(CheckpointError, match=r"0\.1\.weight"):
        headed.read("medusa_head.0.1.weight")
