"""Models compiled for GPUs with float16 give the CPU engine's logits, as far as float16 can tell.

It takes a Vulkan driver with shader-f16: tests/webgpu/get_mesa.sh brings one for the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

import mlcpipe
from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model, model_types
from tests.conftest import exact_target
from tests.models import tiny
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

CONTEXT, CHUNK, PROMPT, STEPS = 64, 8, 12, 6
# A residual stream is rounded to float16 ten times a layer: two norms, the products with query, key and value, the
# attention, the output, the sum, gate and up, their product, down, the sum; before and after the layers three times.
ROUNDINGS_OF_LAYER, ROUNDINGS = 10, 3
UNIT = 2.0**-11  # half the distance of float16 numbers at 1
# Experts are chosen by comparing numbers: where two are close, rounding chooses another. All of them are mixed here.
ALL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 4}
# The plain weights of one family, and groups that a row of 64 does not fill, go through the same products.
QUANTIZATIONS = {"llama": "q3f16_1", "qwen2": "q0f16"}


def in_browsers(family: str) -> bool:
    """Whether TVM's cache serves a family: it has one shape for all layers."""
    try:
        build_model(tiny.tiny_config(tiny.TinyCase(family, "default")).to_dict()).check_uniform("webgpu")
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def driver() -> str:
    found = dawn.driver_with("shader-f16")
    if not found:
        pytest.skip("no Vulkan driver with shader-f16: tests/webgpu/get_mesa.sh, or set VK_ICD_FILENAMES")
    return found


FAMILIES = [name for name in model_types() if in_browsers(name)]
# Rounding differs by what is computed: a family with experts, one with layer norms and biases of positions, one with an
# activation of its own. All others: `make test-everything`.
USUAL = ("afmoe", "bloom", "apertus")


@pytest.mark.full_cases(*USUAL)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_float32_within_roundings(
    family: str, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, seed = tiny.TinyCase(family, "default"), None
    if "num_experts_per_tok" in tiny.tiny_config(case).to_dict() and family != "phimoe":  # which has two
        case, seed = tiny.TinyCase(family, "all-experts", ALL_EXPERTS), 1
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint", seed=seed)
    for target, name, kv in (("webgpu-f16", "web", "f16"), (exact_target(tmp_path), "cpu", "f32")):
        mlcpipe.compile(
            checkpoint,
            target=target,
            quantization=QUANTIZATIONS.get(family, "q4f16_1"),
            kv_cache_dtype=kv,
            output=tmp_path / name,
            context_length=CONTEXT,
            quick=name == "web",
        )
    prompt = list(map(int, tiny.prompt_tokens(case, PROMPT)))
    monkeypatch.setenv("GALLIVM_PERF", "nopt")  # Mesa on a CPU: kernels are compiled in half the time
    (run,) = dawn.generate(tmp_path / "web", [prompt], STEPS, CONTEXT, CHUNK, driver)
    expected = mlcpipe.Engine(tmp_path / "cpu").logits([*prompt, *run.tokens[:-1]])[len(prompt) - 1 :]
    layers = tiny.tiny_config(case).num_hidden_layers
    bound = (ROUNDINGS_OF_LAYER * layers + ROUNDINGS) * UNIT * float(np.abs(expected).max())
    errors = np.abs(run.logits - expected)
    assert errors.max() <= bound
    # The error is that of float16: a library that calculates in float32 would be a hundred times closer.
    assert errors.max() >= UNIT / 8 * float(np.abs(expected).max())
    best = expected[np.arange(STEPS), run.tokens]
    assert (expected.max(axis=1) - best <= 2 * bound).all()
    runner_up = np.sort(expected, axis=1)[:, -2]
    clear = expected.max(axis=1) - runner_up > 2 * errors.max()
    assert (np.array(run.tokens) == expected.argmax(axis=1))[clear].all() and clear.any()
