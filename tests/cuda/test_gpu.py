"""What only an NVIDIA GPU has: CUDA graphs, matrix units, and code for its own architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.devices import cuda
from mlcpipe.devices.support.cuda_graph import Graph
from tests.conftest import TinyLlama, write_llama
from tests.cuda import ways

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

from tests.emulator import cases, engine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "checkpoint", TinyLlama(hidden_size=128))


@pytest.mark.parametrize("scheme", cases.PACKED)
@pytest.mark.parametrize("own", [False, True], ids=["general", "own"])
def test_packed_weights_equal_the_cpu_engine(
    scheme: str, own: bool, cuda_device: cuda.Device, checkpoint: Path, tmp_path: Path
) -> None:
    target = cuda_device.best_target() if own else "cuda"
    job = cases.packed_job(checkpoint, f'base = "{target}"\n', scheme)
    cases.equals_cpu_engine(checkpoint, scheme, {**job, **engine.run(job, "cuda:0")}, tmp_path)


@pytest.mark.parametrize("way", ways.SAMPLING)
def test_graphs_give_the_same_tokens(
    way: str, cuda_device: cuda.Device, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kernel by kernel, and of engines that allocate between each other's steps."""
    monkeypatch.setenv("MLCPIPE_CUDA_GRAPHS", "1")
    launches = []
    launch = Graph.launch
    monkeypatch.setattr(Graph, "launch", lambda graph: (launches.append(graph), launch(graph)))
    target = f'base = "{cuda_device.best_target()}"\n'
    job = ways.job(cases.compiled(checkpoint, target, checkpoint.parent / "bundle", "q4f16_1"), way)
    expected = ways.tokens(job, graphs=False)
    assert not launches and len(set(expected.tolist())) > 8
    assert ways.tokens(job).tolist() == expected.tolist()
    assert len(launches) >= job["count"] - 4
    for column in ways.interleaved(job).T:
        assert column.tolist() == expected.tolist()
