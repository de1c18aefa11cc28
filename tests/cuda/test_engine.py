"""The generated CUDA C++ of whole models, executed on the CPU by the engine through TVM's CUDA runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

import mlcpipe
from mlcpipe import Engine
from mlcpipe.compiler.cuda.nvrtc import Nvrtc
from tests.conftest import TinyLlama, write_llama
from tests.models import tiny

from . import emulation

pytestmark = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "runs")

FAMILIES = sorted(p.stem for p in tiny.MODELS_FOLDER.glob("*.py") if p.stem != "__init__")
# Chunks of 8 tokens: a prompt of 20 attends to cached pages too, and stays inside the smallest window.
CHUNKS = 'base = "{base}"\n[limits]\nmax_prefill_chunk = 8\n'
EXACT = 'description = "this CPU, activations in float32"\nbase = "cpu-native"\n[schedule]\nint8_activations = 0\n'
CONTEXT, TOKENS, PREFILL = 128, 40, 12
TOLERANCE = 1e-4  # of the CPU's, in tests/models/test_parity.py
# Of the largest logit: activations in float16 have 11 bits, 2**-11 a rounding, and some hundred of them.
FLOAT16 = 2e-2
# What the families have between them: windows and two kinds of RoPE, softcap, biases, experts and routers.
FEW = ("gemma2", "qwen2", "qwen3_moe")
# Activations in float16 and one chunk of 40 tokens: matrix units, tiles that are not full, rows of x that end within 32
# columns (104 of them, where weights have no groups).
PACKED = ("q4f16_1", "q8f16_1", "q0f16")


def _compile(checkpoint: Path, target: str, folder: Path, scheme: str) -> Path:
    described = folder.parent / f"{folder.name}.toml"
    described.write_text(target, encoding="utf-8")
    return mlcpipe.compile(
        checkpoint, target=str(described), output=folder, quantization=scheme, context_length=CONTEXT
    )


def _job(family: str, folder: Path) -> dict[str, Any]:
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, folder / f"{family}-checkpoint")
    return {
        "bundle": _compile(checkpoint, CHUNKS.format(base="cuda-f32"), folder / family, "q0f32"),
        "tokens": tiny.prompt_tokens(case, TOKENS),
        "prefill": PREFILL,
        "greedy": [tiny.prompt_tokens(case, tiny.GREEDY_PROMPT), tiny.GREEDY_TOKENS],
    }


@pytest.fixture(scope="module")
def found(nvrtc: Nvrtc, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What engines on the emulated device computed, all in one process, by family, and of a llama by scheme."""
    folder = tmp_path_factory.mktemp("cuda")
    with pytest.MonkeyPatch.context() as patch:
        emulation.emulate(patch, folder)
        jobs = {family: _job(family, folder) for family in FEW}
        checkpoint = write_llama(folder / "llama-checkpoint", TinyLlama(hidden_size=128))
        for scheme in PACKED:
            bundle = _compile(checkpoint, 'base = "cuda"\n', folder / scheme, scheme)
            jobs[scheme] = {"bundle": bundle, "tokens": list(range(TOKENS)), "prefill": PREFILL}
    made = emulation.run_engines(emulation.build_driver(folder, nvrtc), list(jobs.values()), folder)
    return {name: {**job, **arrays} for (name, job), arrays in zip(jobs.items(), made)}


def _equals_transformers(family: str, one: dict[str, Any]) -> None:
    """In float32: chunks of a prompt, each decode step, and greedy tokens."""
    case = tiny.TinyCase(family, "default")
    assert str(one["device"]) == "cuda:0, emulated GPU [compute capability 9.0]"
    expected = tiny.reference_logits(case, one["tokens"])
    np.testing.assert_allclose(one["all"], expected, rtol=0, atol=TOLERANCE)
    steps = tiny.reference_stepwise(case, one["tokens"], PREFILL)
    np.testing.assert_allclose(one["steps"], steps, rtol=0, atol=TOLERANCE)
    assert one["tokens_after"].tolist() == tiny.reference_greedy(case, one["greedy"][0])


@pytest.mark.parametrize("family", FEW)
def test_a_family_equals_transformers(family: str, found: dict[str, dict[str, Any]]) -> None:
    _equals_transformers(family, found[family])


@pytest.mark.everything
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(FEW)))
def test_other_families_equal_transformers(
    family: str, nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation.emulate(monkeypatch, tmp_path)
    job = _job(family, tmp_path)
    (made,) = emulation.run_engines(emulation.build_driver(tmp_path, nvrtc), [job], tmp_path)
    _equals_transformers(family, {**job, **made})


@pytest.mark.parametrize("scheme", PACKED)
def test_packed_weights_equal_the_cpu_engine(scheme: str, found: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    one = found[scheme]
    checkpoint = one["bundle"].parent / "llama-checkpoint"
    expected = Engine(_compile(checkpoint, EXACT, tmp_path / "cpu", scheme)).logits(one["tokens"])
    bound = FLOAT16 * float(np.abs(expected).max())
    np.testing.assert_allclose(one["all"], expected, rtol=0, atol=bound)
    np.testing.assert_allclose(one["steps"], expected[PREFILL - 1 :], rtol=0, atol=bound)
