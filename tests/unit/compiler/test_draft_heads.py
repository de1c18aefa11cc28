"""Functions of draft heads: for targets with activations of 16 bits, too, and none over TVM's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.draft_heads import with_draft_head
from mlcpipe.compiler.job import lower
from mlcpipe.compiler.manifest import model_info
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.targets import load_target
from tests.conftest import TinyLlama, write_llama
from tests.models.head_files import EAGLE, HEADS, random_eagle, random_heads, write_eagle, write_heads


@pytest.fixture
def headed(tmp_path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(write_llama(tmp_path / "model"))
    return with_draft_head(checkpoint, write_heads(tmp_path / "head", random_heads(TinyLlama().vocab_size)))


def test_functions_of_heads(headed: Checkpoint) -> None:
    job = lower(headed, load_target("cuda"), "q4f16_1")
    assert job.target.activation_dtype == "float16" and model_info(job).draft_heads == HEADS
    names = {gv.name_hint for gv in job.state.mod.functions}
    assert {"decode", "decode_hidden", *(f"draft_head_{head}" for head in range(HEADS))} <= names
    assert [w.decode_nbytes for w in job.state.weights if w.name.startswith("medusa_head.")] == [0] * 3 * HEADS


def test_functions_of_an_eagle_head(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_llama(tmp_path / "model", TinyLlama(layers=3)))
    headed = with_draft_head(checkpoint, write_eagle(tmp_path / "head", random_eagle(TinyLlama().vocab_size)))
    job = lower(headed, load_target("cuda"), "q4f16_1")
    names = {gv.name_hint for gv in job.state.mod.functions}
    assert {"decode_hidden", "prefill_hidden", "draft_prompt", "draft_first", "draft_next"} <= names
    info = model_info(job)
    assert info.eagle is not None and info.eagle.hidden_size == EAGLE["hidden_size"] and not info.draft_heads
    assert not any(w.decode_nbytes for w in job.state.weights if w.name.startswith("eagle_head."))
    stretched = {**EAGLE, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    other = with_draft_head(
        checkpoint, write_eagle(tmp_path / "other", random_eagle(TinyLlama().vocab_size), stretched)
    )
    with pytest.raises(ConfigError, match="frequencies of RoPE follow the length"):
        lower(other, load_target("cuda"), "q4f16_1")


def test_hosts_of_mlc_have_no_drafts(headed: Checkpoint) -> None:
    with pytest.raises(TargetError, match=r"no draft heads.*webgpu.*such as cpu"):
        lower(headed, load_target("webgpu"), "q4f16_1")
