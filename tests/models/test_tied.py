"""Which stored tensors are the embedding and the head, in every family, as transformers loads them. Compiles nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.export import OUTPUT_NAMES
from mlcpipe.compiler.job import stored_weights
from mlcpipe.errors import CheckpointError
from mlcpipe.quantization.recipe import load_recipe
from mlcpipe.targets import load_target
from tests.models.small_configs import FAMILIES, build
from tests.models.tiny import TinyCase, write_tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STORED = ("embedding", "head", "equal", "different")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a family that ties by default, and of one that does not."""
    folder = tmp_path_factory.mktemp("tied")
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False, "layer_types": None}
    return {
        family: write_tiny(TinyCase(family, "tied", sizes), folder / family, seed=0) for family in ("llama", "gemma2")
    }


def store(folder: Path, stored: str, tied: bool | None, index: bool = False) -> dict[str, np.ndarray]:
    """Rewrite a checkpoint with some of the two; what is stored. An `index` names both."""
    tensors = load_file(folder / "model.safetensors")
    if stored == "equal":
        tensors[HEAD] = tensors[EMBEDDING].copy()
    for name in {"embedding": [HEAD], "head": [EMBEDDING]}.get(stored, []):
        del tensors[name]
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
    named = [*tensors, EMBEDDING, HEAD] if index else tensors
    text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(named, "model-1.safetensors")})
    (folder / "model.safetensors.index.json").write_text(text)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | ({} if tied is None else {"tie_word_embeddings": tied})))
    return tensors


def name_of(values: np.ndarray, tensors: dict[str, np.ndarray]) -> str:
    return next((name for name in (EMBEDDING, HEAD) if name in tensors and np.array_equal(values, tensors[name])), "")


def reference(folder: Path, tensors: dict[str, np.ndarray]) -> tuple[str, ...] | None:
    """The stored tensors that transformers has as embedding and head; None where it misses one."""
    auto: Any = AutoModelForCausalLM  # untyped in transformers
    model, found = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if found["missing_keys"]:
        return None
    both = model.get_input_embeddings(), model.get_output_embeddings()
    return tuple(name_of(module.weight.detach().numpy(), tensors) for module in both)


def ours(folder: Path, tensors: dict[str, np.ndarray]) -> tuple[str, ...] | None:
    checkpoint = open_checkpoint(folder)
    try:
        weights = {w.name: w for w in stored_weights(checkpoint, load_target("cpu-native"), load_recipe("q0f32"))}
    except CheckpointError as error:
        assert "is missing" in str(error) and (EMBEDDING in str(error) or HEAD in str(error))
        return None
    head = next(name for name in OUTPUT_NAMES if name in weights)
    return tuple(name_of(checkpoint.read(weights[name].sources[0][0]), tensors) for name in (EMBEDDING, head))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("tied", [True, False, None])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_is_read(
    family: str, tied: bool | None, stored: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoints[family], tmp_path / "checkpoint"))
    tensors = store(folder, stored, tied, index=tied is True)
    expected = reference(folder, tensors)
    assert ours(folder, tensors) == expected
    if stored == "different":
        assert expected == (EMBEDDING, HEAD)


@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    [("gpt_neox", "gpt_neox.embed_in.weight", "embed_out.weight"), ("opt", "model.decoder.embed_tokens.weight", HEAD)],
)
def test_names_are_the_family_s(family: str, embedding: str, head: str, tmp_path: Path) -> None:
    write_tiny(TinyCase(family, "tied", {"num_hidden_layers": 1, "tie_word_embeddings": False}), tmp_path, seed=0)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is False
    tensors = load_file(file)
    del tensors[embedding]
    save_file(tensors, file, metadata={"format": "pt"})
    alone = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(alone.read(embedding), tensors[head])
    assert head not in alone.tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_families_tie_as_in_transformers(family: str) -> None:
    assert build(family).facts.tied == AutoConfig.for_model(family).tie_word_embeddings
