"""EAGLE-3 heads: the forms of their checkpoints, and what belongs to another model or would change the result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.draft_heads import EagleHead, with_draft_head
from mlcpipe.errors import CheckpointError, ConfigError
from tests.conftest import TinyLlama, write_llama
from tests.models.head_files import EAGLE, Tensors, random_eagle, write_eagle

VOCAB = TinyLlama().vocab_size
SOME: Mapping[str, Any] = {**EAGLE, "draft_vocab_size": 100}
GOOD = random_eagle(VOCAB, SOME)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path / "model", TinyLlama(layers=7)))


def read(checkpoint: Checkpoint, folder: Path, tensors: Tensors = GOOD, config: Mapping[str, Any] = SOME) -> EagleHead:
    head = with_draft_head(checkpoint, write_eagle(folder / "head", tensors, config)).draft_head
    assert isinstance(head, EagleHead)
    return head


def test_tokens_of_the_head(checkpoint: Checkpoint, tmp_path: Path) -> None:
    head = read(checkpoint, tmp_path)
    assert head.places is not None and head.vocab == 100 and not head.embeds
    np.testing.assert_array_equal(head.places[:6], [0, -1, 1, -1, 2, -1])
    headed = with_draft_head(checkpoint, tmp_path / "head")
    np.testing.assert_array_equal(headed.read("eagle_head.fc.weight"), GOOD["fc.weight"])
    digest = headed.content_hash()
    write_eagle(tmp_path / "head", GOOD, {**SOME, "rms_norm_eps": 1e-6})
    assert with_draft_head(checkpoint, tmp_path / "head").content_hash() != digest != checkpoint.content_hash()


def test_speculators_form(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its fields lie in an object, its layer is `layers.0`, and its embedding is a copy of the model's."""
    tensors = {name.replace("midlayer.", "layers.0."): array for name, array in GOOD.items()}
    tensors["embed_tokens.weight"] = checkpoint.read("model.embed_tokens.weight")
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 100}
    config = {**outer, "norm_before_residual": True, "transformer_layer_config": dict(EAGLE)}
    head = read(checkpoint, tmp_path, tensors, config)
    assert head.norm_before_residual and not head.embeds and head.layers == (2, 3, 4)
    assert "eagle_head.midlayer.self_attn.q_proj.weight" in head.tensors
    tensors["embed_tokens.weight"] += 1
    assert read(checkpoint, tmp_path / "other", tensors, config).embeds


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 3, 4)),  # n = 7: 2, n // 2, n - 3
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 6]}, (0, 1, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}}, (1, 2, 6)),
    ],
    ids=["authors", "vllm", "sglang"],
)
def test_layers(config: Mapping[str, Any], layers: tuple[int, ...], checkpoint: Checkpoint, tmp_path: Path) -> None:
    rest = {name: value for name, value in SOME.items() if name != "eagle_aux_hidden_state_layer_ids"}
    assert read(checkpoint, tmp_path, config={**rest, **config}).layers == layers


def tokens(*offsets: int) -> Tensors:
    return {**GOOD, "d2t": np.array([*offsets, *GOOD["d2t"][len(offsets) :]])}


WITHOUT_MAP = {name: array for name, array in GOOD.items() if name not in ("d2t", "t2d")}


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (random_eagle(VOCAB, SOME, 32), {}, r"fc\.weight' of.*another model.*\[64, 192\].*\[64, 96\]"),
        (random_eagle(VOCAB, {**SOME, "draft_vocab_size": 90}), {}, r"d2t.*int64 \[100\].*\[90\]"),
        (WITHOUT_MAP, {}, "d2t of the draft head is missing"),
        (tokens(-1), {}, "d2t of the draft head.*in their order"),
        (tokens(5, 5), {}, "d2t of the draft head.*in their order"),
        (tokens(0, 2**63 - 1), {}, "d2t of the draft head.*tokens below"),
        ({**GOOD, "d2t": GOOD["d2t"].astype(np.int32)}, {}, "d2t.*int64.*int32"),
        ({**GOOD, "t2d": ~GOOD["t2d"]}, {}, "t2d.*the tokens of d2t"),
        ({**GOOD, "t2d": GOOD["t2d"][:5]}, {}, "t2d.*the tokens of d2t"),
        ({**GOOD, "midlayer.extra": np.zeros(3, np.float32)}, {}, r"midlayer\.extra' .*would not be used"),
        (GOOD, {"num_hidden_layers": 2}, r"num_hidden_layers is not supported.*\[1\].*2"),
        (GOOD, {"attention_bias": True}, "attention_bias is not supported"),
        (GOOD, {"norm_before_fc": True}, "norm_before_fc is not supported"),
        (GOOD, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is not supported"),
        (GOOD, {"eagle_config": []}, "eagle_config.*an object"),
        (GOOD, {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}, "three of the model's 7 layers"),
        (GOOD, {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "three of the model's 7 layers"),
        (GOOD, {"eagle_aux_hidden_state_layer_ids": [0, True, 2]}, "three of the model's 7 layers"),
        (GOOD, {"eagle_aux_hidden_state_layer_ids": "012"}, "three of the model's 7 layers"),
        (GOOD, {"hidden_size": 1 << 40}, "hidden_size.*an integer from 1 to"),
        (GOOD, {"draft_vocab_size": VOCAB + 1}, "draft_vocab_size.*an integer from 1 to"),
        (GOOD, {"eagle_config": 3}, "eagle_config.*an object"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    tensors: Tensors, config: Mapping[str, Any], said: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=said) as raised:
        read(checkpoint, tmp_path, tensors, {**SOME, **config})
    assert "\n" not in str(raised.value)
