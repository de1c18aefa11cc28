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
from mlcpipe.quantization import load_scheme, scheme_names
from mlcpipe.targets import load_target
from tests.models import tiny
from tests.models.kinds import first_of_each_kind
from tests.spirv import harness

# Without those of GGUF's blocks, which rows of tiny models do not fill: tests/vulkan has them in wider models.
SCHEMES = [name for name in scheme_names() if not load_scheme(name).blocks]
FAMILIES = list(model_types())
TURNS = range(max(len(FAMILIES), len(SCHEMES)))
CASES = [(FAMILIES[i % len(FAMILIES)], SCHEMES[i % len(SCHEMES)]) for i in TURNS]
KINDS = first_of_each_kind()
# Every third kind, and the one scheme that these leave out.
USUAL = [*[case for case in CASES if case[0] in KINDS][::3], ("gpt2", "q8f16_0")]


@harness.needs_tools
@pytest.mark.full_cases(*(f"{family}-{scheme}" for family, scheme in USUAL))
@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_kernels_are_valid(family: str, scheme: str, tmp_path: Path) -> None:
    checkpoint = tiny.write_tiny(tiny.TinyCase(family, "default"), tmp_path / "checkpoint")
    target, quantization = load_target("vulkan-f16"), load_scheme(scheme)
    model = prepare_model(open_checkpoint(checkpoint).config, target, quantization)
    state = pipeline.run(export(model, target, quantization, 64), *pipeline.SHARED, pipeline.SCHEDULE)
    found = harness.model_kernels(state)
    assert len(found) > 25
    assert not any("shaderInt64" in kernel.features for kernel in found)
    harness.check(found, tmp_path)
