"""The kernels of every model family, with float16 activations and each quantization in turn: valid SPIR-V.

Those with float32 activations are checked where tests/vulkan runs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.export import export, prepare_model
from mlcpipe.models import model_types
from mlcpipe.passes import pipeline
from mlcpipe.quantization import load_scheme
from mlcpipe.targets import load_target
from tests.models import tiny
from tests.spirv import harness

SCHEMES = (
    "q4f16_1", "q0f16", "q8f16_1", "q8f16_0", "q3f16_1", "q4f32_1", "q0f32", "q8f32_1", "q8f32_0", "q4f16_k", "q4f16_m"
)  # fmt: skip
FAMILIES = list(model_types())
CASES = [(FAMILIES[i % len(FAMILIES)], scheme) for i, scheme in enumerate(SCHEMES)]


@harness.needs_tools
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_kernels_are_valid(family: str, scheme: str, tmp_path: Path) -> None:
    checkpoint = tiny.write_tiny(tiny.TinyCase(family, "default"), tmp_path / "checkpoint")
    target, quantization = load_target("vulkan-f16"), load_scheme(scheme)
    model = prepare_model(open_checkpoint(checkpoint).config, target, quantization)
    state = pipeline.run(export(model, target, quantization, 64), *pipeline.SHARED, pipeline.SCHEDULE)
    found = harness.model_kernels(state)
    assert len(found) > 25
    assert not any("shaderInt64" in kernel.features for kernel in found)
    assert harness.check(found, tmp_path) > 0


def test_every_family_and_quantization_has_its_turn() -> None:
    folder = Path(pipeline.__file__).parents[1] / "quantization"
    assert {path.stem for path in folder.glob("q[0-9]*.py")} == set(SCHEMES)
    assert {family for family, _ in CASES} == set(FAMILIES)
