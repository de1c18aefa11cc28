"""The generated Metal kernels of whole models, executed on the CPU by the engine, behind a stand-in for TVM's runtime.

What is not checked so: Apple's compiler, fast arithmetic, the order in which threads of a SIMD group see memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

from mlcpipe.compiler.link import find_linker
from mlcpipe.host.cpu import cpu_model
from tests.conftest import TinyLlama, write_llama
from tests.emulator import cases
from tests.metal import emulation

# Host code for this machine, so that the engine loads it.
HERE = '[tvm.host]\nkind = "llvm"\nmtriple = "x86_64-unknown-linux-gnu"\n'
FLOAT16 = f'base = "metal"\n{HERE}'
FLOAT32 = f'base = "metal"\nactivation_dtype = "float32"\n{HERE}'
SCHEME = "q4f16_1"  # `everything` has the others, and all families


@pytest.fixture(scope="module", autouse=True)
def linked_for_here() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlcpipe.compiler.backends.metal.find_apple_linker", find_linker)
        yield


def _packed(scheme: str, runtime: Path, folder: Path) -> None:
    """Prompts on matrices of SIMD groups."""
    checkpoint = write_llama(folder / "checkpoint", TinyLlama(hidden_size=128))
    job = cases.packed_job(checkpoint, FLOAT16, scheme)
    assert (job["bundle"] / "lib" / "model.so").read_bytes().count(b"mlcpipe_matrix_multiply(0,") >= 4
    (made,) = emulation.run_engines(runtime, [job], folder)
    assert str(made["device"]) == f"metal:0, {cpu_model()}"  # a Mac's GPU has its chip's name
    cases.equals_cpu_engine(checkpoint, scheme, {**job, **made}, folder)


def test_packed_weights_equal_the_cpu_engine(runtime: Path, tmp_path: Path) -> None:
    _packed(SCHEME, runtime, tmp_path)


@pytest.mark.everything
@pytest.mark.parametrize("scheme", sorted({*cases.PACKED} - {SCHEME}))
def test_other_schemes_equal_the_cpu_engine(scheme: str, runtime: Path, tmp_path: Path) -> None:
    _packed(scheme, runtime, tmp_path)


@pytest.mark.everything
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_families_equal_transformers(family: str, runtime: Path, tmp_path: Path) -> None:
    job = cases.family_job(family, FLOAT32, tmp_path)
    (made,) = emulation.run_engines(runtime, [job], tmp_path)
    cases.equals_transformers(family, {**job, **made})
