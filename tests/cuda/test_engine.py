"""The generated CUDA C++ of whole models, executed on the CPU by the engine through TVM's CUDA runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from tests.conftest import TinyLlama, write_llama
from tests.cuda import emulation, ways
from tests.emulator import cases

pytestmark = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "runs")

FLOAT32, FLOAT16 = 'base = "cuda-f32"\n', 'base = "cuda"\n'
SCHEME = "q4f16_1"  # `everything` has the others
DEVICE = "cuda:0, emulated GPU [compute capability 9.0]"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("cuda") / "checkpoint", TinyLlama(hidden_size=128))


@pytest.fixture(scope="module")
def found(nvrtc: Nvrtc, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """What engines on the emulated device computed of a llama, all in one process: logits, and tokens in several ways."""
    folder = checkpoint.parent
    with pytest.MonkeyPatch.context() as patch:
        emulation.emulate(patch, folder)
        jobs = {SCHEME: cases.packed_job(checkpoint, FLOAT16, SCHEME)}
        jobs |= {way: ways.job(jobs[SCHEME]["bundle"], way) for way in ways.SAMPLING}
    made = emulation.run_engines(emulation.build_driver(folder, nvrtc), list(jobs.values()), folder)
    return {name: {**job, **arrays} for (name, job), arrays in zip(jobs.items(), made)}


GRAPHS, ALONE, IN_GRAPHS, RECORDED, UPDATED = range(5)


@pytest.mark.parametrize("way", ways.SAMPLING)
def test_steps_are_graphs(way: str, found: dict[str, dict[str, Any]]) -> None:
    """One graph launch and no other kernel per token; one recording serves all lengths."""
    one = found[way]
    counts, steps = one["counts"], one["count"] - 1  # the first token is the prompt's
    assert counts[0, ALONE] and not counts[0, GRAPHS]
    assert counts[1, ALONE] and not counts[1, GRAPHS]  # before it is clear that others follow
    steady = counts[2 : 1 + steps]
    assert len(steady) >= 30 and steady[:, GRAPHS].tolist() == [1] * (steps - 1) and not steady[:, ALONE].any()
    assert steady[:, RECORDED].tolist() == [1] + [0] * (steps - 2) and not steady[:, UPDATED].any()
    assert steady[:, IN_GRAPHS].min() > 10


@pytest.mark.parametrize("way", ways.SAMPLING)
@pytest.mark.parametrize("other", ["plain", "failed", "interleaved"])
def test_graphs_give_the_same_tokens(way: str, other: str, found: dict[str, dict[str, Any]]) -> None:
    """As kernel by kernel, where recordings fail, and of engines that allocate between each other's steps."""
    one = found[way]
    assert len(set(one["tokens"].tolist())) > 8
    columns = one["interleaved"].T if other == "interleaved" else [one[other]]
    assert all(column.tolist() == one["tokens"].tolist() for column in columns)
    assert [text.partition(":")[0] for text in one["warning"]] == ["no CUDA graphs, steps launch kernel by kernel"]


def _run(job: dict[str, Any], nvrtc: Nvrtc, folder: Path) -> dict[str, Any]:
    (made,) = emulation.run_engines(emulation.build_driver(folder, nvrtc), [job], folder)
    return {**job, **made}


@pytest.mark.full_cases("gemma2")
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_a_family_equals_transformers(
    family: str, nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation.emulate(monkeypatch, tmp_path)
    one = _run(cases.family_job(family, FLOAT32, tmp_path), nvrtc, tmp_path)
    assert str(one["device"]) == DEVICE
    cases.equals_transformers(family, one)


@pytest.mark.full_cases(SCHEME)
@pytest.mark.parametrize("scheme", cases.PACKED)
def test_packed_weights_equal_the_cpu_engine(
    scheme: str, nvrtc: Nvrtc, checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if scheme == SCHEME:
        one = request.getfixturevalue("found")[scheme]
    else:
        emulation.emulate(request.getfixturevalue("monkeypatch"), tmp_path)
        one = _run(cases.packed_job(checkpoint, FLOAT16, scheme), nvrtc, tmp_path)
    cases.equals_cpu_engine(checkpoint, scheme, one, tmp_path)
