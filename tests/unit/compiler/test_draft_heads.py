"""Functions of draft heads: for targets with activations of 16 bits, too, and none over TVM's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.checkpoint.eagle_head import with_draft_head
from mlcpipe.compiler.export import prepare_model
from mlcpipe.compiler.job import lower
from mlcpipe.compiler.manifest import model_info
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.conftest import TinyLlama, write_llama
from tests.models.head_files import EAGLE, random_eagle, write_eagle
from tests.models.small_configs import config


@pytest.fixture
def headed(tmp_path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(write_llama(tmp_path / "model", TinyLlama(layers=3)))
    return with_draft_head(checkpoint, write_eagle(tmp_path / "head", random_eagle(TinyLlama().vocab_size)))


def test_functions_of_a_head(headed: Checkpoint, tmp_path: Path) -> None:
    job = lower(headed, load_target("cuda"), "q4f16_1")
    names = {gv.name_hint for gv in job.state.mod.functions}
    assert job.target.activation_dtype == "float16"
    assert {"decode", "decode_hidden", "prefill_hidden", "draft_prompt", "draft_first", "draft_next"} <= names
    info = model_info(job)
    assert info.eagle is not None and info.eagle.hidden_size == EAGLE["hidden_size"]
    assert not any(w.decode_nbytes for w in job.state.weights if w.name.startswith("eagle_head."))
    stretched = {**EAGLE, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    other = with_draft_head(headed, write_eagle(tmp_path / "other", random_eagle(TinyLlama().vocab_size), stretched))
    with pytest.raises(ConfigError, match="frequencies of RoPE follow the length"):
        lower(other, load_target("cuda"), "q4f16_1")


def test_states_that_do_not_go_back_have_no_drafts(headed: Checkpoint) -> None:
    heads, sizes = headed.draft_head, config("lfm2", vocab_size=TinyLlama().vocab_size)
    with pytest.raises(ConfigError, match="no draft heads for layers whose states do not go back .*lfm2"):
        prepare_model(sizes, load_target("cuda"), load_scheme("q4f16_1"), draft_head=heads)


def test_hosts_of_mlc_have_no_drafts(headed: Checkpoint) -> None:
    with pytest.raises(TargetError, match=r"no draft heads.*webgpu.*kv_cache = pages"):
        lower(headed, load_target("webgpu"), "q4f16_1")
