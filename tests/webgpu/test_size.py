"""How large the library of a browser bundle is, as users download it: linked for release."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import mlcpipe
from tests.conftest import DEMO
from tests.webgpu import dawn

pytestmark = [
    pytest.mark.everything,  # emcc optimizes a minute long
    pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs"),
]


def test_the_released_library_is_small_and_runs(tmp_path: Path) -> None:
    bundle = mlcpipe.compile(DEMO, target="webgpu", quantization="q4f16_1", output=tmp_path / "bundle")
    raw = (bundle / "lib" / "model.wasm").read_bytes()
    assert len(raw) <= 3_600_000
    assert len(gzip.compress(raw)) <= 1_200_000
    (run,) = dawn.generate(bundle, [[1, 2, 3]], 2, 64, 16)
    assert len(run.tokens) == 2
