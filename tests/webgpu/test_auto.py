"""`--quantization auto` for browsers: one download of weights, a library for every GPU and one for those with float16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.bundle import read_manifest, verify
from mlcpipe.bundle.states import kv_bytes_per_token
from mlcpipe.errors import TargetError
from tests.conftest import write_llama
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")


def test_both_libraries_stand_in_the_manifest_best_first(tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    bundle = mlcpipe.compile(checkpoint, target="webgpu", quantization="auto", output=tmp_path / "b", quick=True)
    manifest = read_manifest(bundle)
    verify(bundle, manifest, deep=True)
    half, plain = manifest.target.variants
    assert (half.features, plain.features) == (("shader-f16",), ())
    assert half.library is not None and plain.library is not None
    assert (half.library.path, plain.library.path) == ("lib/model-f16.wasm", "lib/model.wasm")
    assert (half.library.dtype, plain.library.dtype) == ("float16", "float32")
    assert (half.library.kv_dtype, plain.library.kv_dtype) == ("float16", "float32")
    assert (manifest.quantization, manifest.model.dtype) == ("q4f16_m", "float32")
    assert {param.scheme for param in manifest.params if param.scheme} == {"q4f16_m", "Q8_0"}
    # What is said without a library's name is said of the one that every GPU runs.
    assert manifest.memory_plan == plain.library.memory_plan
    assert 2 * kv_bytes_per_token(half.library.states) == kv_bytes_per_token(plain.library.states)
    assert half.library.memory_plan.weights_bytes == plain.library.memory_plan.weights_bytes
    assert b"enable f16;" in (bundle / "lib" / "model-f16.wasm").read_bytes()
    assert b"enable f16;" not in (bundle / "lib" / "model.wasm").read_bytes()
    cache = json.loads((bundle / "tensor-cache.json").read_text(encoding="utf-8"))
    assert [r["name"] for shard in cache["records"] for r in shard["records"]] == [p.name for p in manifest.params]


def test_a_companion_that_needs_other_weights_is_refused(tmp_path: Path) -> None:
    board = tmp_path / "board.toml"
    board.write_text('base = "webgpu"\ncompanions = ["cpu"]\n', encoding="utf-8")
    with pytest.raises(TargetError, match="the companion cpu stores weights in another way.*rows32_pairs.*rows16"):
        mlcpipe.compile(
            write_llama(tmp_path / "checkpoint"), target=str(board), quantization="auto", output=tmp_path / "b"
        )
