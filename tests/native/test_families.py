"""Every family's tiny model gives the same bits of logits and the same tokens as in Python."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the tiny checkpoints are made by torch")
pytest.importorskip("transformers", reason="the tiny checkpoints are transformers models")

import mlcpipe
from mlcpipe import SamplingParams
from tests.models import tiny
from tests.native.engine import Runtime

pytestmark = pytest.mark.full
USUAL = ("default", "longrope", "dynamic", "window")  # the other cases are for `make test-everything`
CASES = [
    pytest.param(case, id=case.id, marks=[] if case.id.endswith(USUAL) else [pytest.mark.everything])
    for cases in tiny.tiny_checkpoints().values()
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_a_family_computes_the_same(case: tiny.TinyCase, runtime: Runtime, tmp_path: Path) -> None:
    """The tokens cross the length where RoPE changes in the cases that have one; the second prompt is shorter again."""
    bundle = mlcpipe.compile(
        tiny.write_tiny(case, tmp_path / "checkpoint"), target="cpu-native", quantization="q0f32",
        output=tmp_path / "bundle", context_length=case.context_length,
    )  # fmt: skip
    native = runtime.open(Path(shutil.copytree(bundle, tmp_path / "copy")), threads=2)
    engine = mlcpipe.Engine(bundle, threads=2)
    tokens = tiny.prompt_tokens(case, 40)
    np.testing.assert_array_equal(native.logits(tokens), engine.logits(tokens))
    params = SamplingParams(temperature=0.8, seed=3)
    for length in (20, 36, 10):
        expected = engine.generate(tokens[:length], sampling=params, max_tokens=24, ignore_eos=True)
        found = native.generate(tokens[:length], params, max_tokens=24)
        assert found.tokens == expected.token_ids
        assert found.cached_tokens == expected.stats.cached_tokens
    native.close()
