"""Models compiled for subgroups of one size give the CPU engine's logits, and their library says what size.

It takes a Vulkan driver with subgroups of 8 lanes or of 16: tests/webgpu/get_mesa.sh brings one for the CPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mlcpipe
from mlcpipe.bundle import read_manifest
from tests.conftest import TinyLlama, exact_target, write_llama
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

BOARD = 'base = "webgpu"\nfeatures = ["subgroups"]\ncompanions = []\n[schedule]\n'
# Octets alone in a workgroup, which exchange what they load; and two subgroups of two, which do not.
SHAPES = {
    8: "subgroup = 8\nshuffle_x = 1\ngemv_blocks = 2\ngemv_invocations = 1\ngemm_rows = 2\ngemm_blocks = 2\nnorm_threads = 8\n",
    16: "subgroup = 16\nshuffle_x = 0\ngemv_blocks = 1\ngemv_invocations = 4096\ngemm_rows = 2\ngemm_blocks = 1\nnorm_threads = 32\n",
}
MODEL = TinyLlama(layers=1, hidden_size=128, intermediate_size=256)
CONTEXT, CHUNK, PROMPT, STEPS = 64, 8, 20, 4
OF_SUBGROUPS = {"gpu.subgroup_matmul", "gpu.subgroup_attention", "gpu.norm"}
CLOSE = 3e-5  # of the largest logit: sums of float32 in another order


@pytest.mark.parametrize("lanes", [8, pytest.param(16, marks=pytest.mark.everything)])
def test_logits_equal_the_cpu_engine(lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LP_NATIVE_VECTOR_WIDTH", str(32 * lanes))  # Mesa on a CPU: a lane has 32 bits
    monkeypatch.setenv("GALLIVM_PERF", "nopt")  # and kernels are compiled in half the time
    driver = dawn.driver_with("subgroups", lanes)
    if not driver:
        pytest.skip(f"no Vulkan driver with subgroups of {lanes}: tests/webgpu/get_mesa.sh, or set VK_ICD_FILENAMES")
    checkpoint = write_llama(tmp_path / "checkpoint", MODEL)
    board = tmp_path / "board.toml"
    board.write_text(BOARD + SHAPES[lanes], encoding="utf-8")
    for target, name in ((str(board), "web"), (exact_target(tmp_path), "cpu")):
        mlcpipe.compile(
            checkpoint,
            target=target,
            quantization="q4f32_1",
            kv_cache_dtype="f32",
            output=tmp_path / name,
            context_length=CONTEXT,
            quick=name == "web",
        )
    manifest = read_manifest(tmp_path / "web")
    (variant,) = manifest.target.variants
    assert (variant.features, variant.subgroup_size) == (("subgroups",), lanes)
    assert {kernel.rule for kernel in manifest.kernels} >= OF_SUBGROUPS
    # Chunks of 8 tokens, so that GEMMs have a part of a tile; a prompt of one token decodes alone.
    prompt = list(map(int, np.random.default_rng(5).integers(0, 256, PROMPT)))
    long, short = dawn.generate(tmp_path / "web", [prompt, prompt[:1]], STEPS, CONTEXT, CHUNK, driver)
    engine = mlcpipe.Engine(tmp_path / "cpu")
    for start, run in ((prompt, long), (prompt[:1], short)):
        engine.reset()
        expected = engine.logits([*start, *run.tokens[:-1]])[len(start) - 1 :]
        np.testing.assert_allclose(run.logits, expected, rtol=0, atol=CLOSE * float(np.abs(expected).max()))
        assert run.tokens == expected.argmax(axis=1).tolist()


def test_the_third_library_stands_first_and_says_its_size(tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(layers=1))
    bundle = mlcpipe.compile(
        checkpoint, target="webgpu-subgroups", quantization="auto", output=tmp_path / "b", quick=True
    )
    variants = read_manifest(bundle).target.variants
    assert [(variant.features, variant.subgroup_size) for variant in variants] == [
        (("shader-f16", "subgroups"), 32),
        (("shader-f16",), None),
        ((), None),
    ]
    paths = [variant.library.path for variant in variants if variant.library]
    assert paths == ["lib/model-subgroups32.wasm", "lib/model-f16.wasm", "lib/model.wasm"]
    codes = [(bundle / path).read_bytes() for path in paths]
    assert [b"enable subgroups;" in code for code in codes] == [True, False, False]
    assert not any(b"mlcpipe.subgroup_" in code for code in codes)
