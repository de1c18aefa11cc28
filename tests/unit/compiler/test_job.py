"""One target of one compile: its file is read once, and its library has a name of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import mlcpipe
from mlcpipe import targets
from mlcpipe.bundle import ENTRY_POINTS
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler import compile as compiler
from mlcpipe.compiler.job import attention_bytes, lower, lower_companion
from mlcpipe.compiler.manifest import library_metadata
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.targets import load_target
from tests.conftest import TinyLlama, write_llama
from tests.models.small_configs import build
from tir_schedules.delta_shape import DeltaShape
from tir_schedules.gpu.gated_delta import gated_delta


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("job") / "checkpoint", TinyLlama(layers=1))


def test_libraries_are_named_after_companions(checkpoint: Path) -> None:
    job = lower(open_checkpoint(checkpoint), load_target("webgpu"), "auto")
    companion = lower_companion(job, "webgpu-f16", "auto")
    assert (job.library, companion.library) == ("model", "model-f16")
    assert companion.tokenizer is job.tokenizer
    assert library_metadata(companion)["model"]["dtype"] == "float16"


@pytest.mark.parametrize(("name", "function"), [("webgpu", "softmax_with_temperature"), ("cpu-native", "sample")])
@pytest.mark.parametrize("gaps", [None, 0, 70])
def test_hosts_draw_from_functions_that_forbid_ids_without_tokens(
    checkpoint: Path, name: str, function: str, gaps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many gaps there are, 64 in a kernel; where there is none, nothing is forbidden."""
    if gaps is not None:
        monkeypatch.setattr(Tokenizer, "missing_ids", lambda self, rows: [(2 * i, 2 * i + 1) for i in range(gaps)])
    mod = lower(open_checkpoint(checkpoint), load_target(name), "q0f32").state.mod
    calls = [line.strip() for line in mod[function].script().splitlines() if "_kernel" in line and "(" in line]
    assert [call.split("(")[0].rpartition(".")[2].rstrip("_1") for call in calls if "forbid" in call] == [
        "forbid_inplace_kernel"
    ] * {None: 1, 0: 0, 70: 2}[gaps]
    assert f"{function}_kernel" in calls[-1] and ("forbid" in calls[0]) == (gaps != 0)


@pytest.mark.parametrize("name", ["vulkan", "webgpu"])
@pytest.mark.fast_cases("webgpu")
def test_a_library_has_the_functions_that_its_manifest_lists(checkpoint: Path, name: str) -> None:
    job = lower(open_checkpoint(checkpoint), load_target(name), "auto")
    listed = {signature.partition("(")[0] for signature in ENTRY_POINTS[job.target.kv_cache]}
    exported = {gv.name_hint for gv, func in job.state.mod.functions.items() if "global_symbol" in (func.attrs or {})}
    assert listed - {"_metadata"} == exported


def test_a_plan_has_what_chunks_of_delta_nets_keep_on_gpus() -> None:
    model = build("qwen3_5_text", layer_types=["linear_attention"] * 4)
    spec = model.model.layers[0].linear_attn.spec
    shape = DeltaShape(spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, "float32", many=True)
    kept = re.search(r"alloc_buffer\(\(m, (?:T\.int64\()?(\d+)", gated_delta(shape).script())
    assert kept is not None
    assert attention_bytes(model, 8) == 4 * 8 * (model.facts.hidden_size + int(kept[1]))


def test_a_target_file_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = tmp_path / "board.toml"
    board.write_text('base = "cpu-native"\n', encoding="utf-8")
    read_toml, reads = targets.read_toml, []

    def counted(path: Path, *arguments: Any) -> dict[str, Any]:
        reads.append(path.name)
        return read_toml(path, *arguments)

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "read_toml", counted)
    monkeypatch.setattr(compiler, "_write_libraries", stop)
    with pytest.raises(KeyboardInterrupt):
        mlcpipe.compile(checkpoint, target=str(board), quantization="auto", output=tmp_path / "bundle")
    assert reads.count("board.toml") == 1
