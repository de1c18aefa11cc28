"""Scheduled kernels are those whose hashes are in `golden/`: see golden.py, which writes them."""

from __future__ import annotations

import json

import pytest

from tests.kernels.golden import GOLDEN, MODELS, golden_names, hashes


@pytest.mark.parametrize("name", golden_names())
@pytest.mark.fast_cases("arm64-linux", "vulkan")
@pytest.mark.full_cases(
    "x86_64-linux", "riscv64-linux", "cuda", "cuda-sm90", "metal", "lavapipe", "amd-rdna3", "adreno",
    "webgpu-subgroups32",
)  # fmt: skip
def test_scheduled_kernels_are_unchanged(name: str) -> None:
    expected = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    found = {model: hashes(name, model) for model in MODELS}
    changed = [
        f"{model}/{key}"
        for model in MODELS
        for key in sorted(set(expected[model]) | set(found[model]))
        if expected[model].get(key) != found[model].get(key)
    ]
    assert changed == [], "if it is meant: python -m tests.kernels.golden"


def test_every_file_is_of_a_target() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == golden_names()
