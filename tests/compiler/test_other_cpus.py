"""A target file of one's own: older instruction sets run here with the same numbers, other machines generate code."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe.compiler.build import build
from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.passes import pipeline
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.conftest import Bundles, TinyLlama

TOKENS = [1, 5, 9, 200, 17, 3, 250, 8, 8, 90]


def board(folder: Path, mcpu: str, mtriple: str) -> str:
    """Write a target file that inherits from `cpu`; return its path."""
    path = folder / f"{mcpu}.toml"
    path.write_text(f'base = "cpu"\n[tvm]\nmcpu = "{mcpu}"\nmtriple = "{mtriple}"\n', encoding="utf-8")
    return str(path)


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux", reason="needs Linux on x86-64"
)
@pytest.mark.parametrize("mcpu", ["x86-64", "haswell"])
def test_older_cpus_give_the_same_logits(mcpu: str, tmp_path: Path, tiny_bundles: Bundles) -> None:
    target = board(tmp_path, mcpu, "x86_64-unknown-linux-gnu")
    older = mlcpipe.Engine(
        mlcpipe.compile(tiny_bundles.checkpoint, target=target, quantization="q4f32_1", output=tmp_path / "bundle")
    )
    here = mlcpipe.Engine(tiny_bundles["q4f32_1"])
    # The same operations in vectors of other lengths: float32 rounding.
    assert np.abs(older.logits(TOKENS) - here.logits(TOKENS)).max() < 1e-4
    assert set(older.manifest.target.cpu_features) < set(here.manifest.target.cpu_features)


@pytest.mark.parametrize(
    ("mcpu", "mtriple", "instruction"),
    [
        ("cortex-a76", "aarch64-linux-gnu", "fmla"),
        ("apple-m1", "arm64-apple-macos", "fmla"),
        ("haswell", "x86_64-pc-windows-msvc", "vfmadd"),
    ],
)
def test_code_is_generated_for_other_machines(mcpu: str, mtriple: str, instruction: str, tmp_path: Path) -> None:
    target, scheme = load_target(board(tmp_path, mcpu, mtriple)), load_scheme("q4f16_1")
    model = prepare_model(TinyLlama().config_json(), target, scheme)
    state, _ = pipeline.run(export(model, target, scheme, 64))
    executable = build(state)
    assembly = "".join(str(module.inspect_source("asm")) for module in executable.mod.imports)
    assert instruction in assembly
